package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/config"
)

// policyFlags are those of run and network policy set.
func policyFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "no-internet", Usage: "let it reach nothing but what --allow says, and the host's DNS forwarder"},
		&cli.StringSliceFlag{Name: "allow", Usage: "let it reach, of what --no-internet or --deny keep from it, what `RULE` says, ADDRESS[/BITS][:PORTS][/PROTOCOL], like 192.0.2.0/24:443,8000-8010/tcp; may be repeated"},
		&cli.StringSliceFlag{Name: "deny", Usage: "keep what `RULE` says of the internet from it; may be repeated"},
	}
}

// flaggedPolicy makes a policy of these flags. Of flags without effect nobody can tell what they were meant for: those are
// refused.
func flaggedPolicy(c *cli.Context, byDefault policy.Action) (*policy.Policy, error) {
	p := &policy.Policy{Default: byDefault}
	if c.Bool("no-internet") {
		p.Default = policy.Deny
	}
	allow, deny := c.StringSlice("allow"), c.StringSlice("deny")
	switch {
	case p.Default == policy.Deny && len(deny) > 0:
		return nil, fmt.Errorf("--deny %s has no effect: what isn't allowed is denied already", deny[0])
	case p.Default == policy.Direct && len(allow) > 0 && len(deny) == 0:
		return nil, fmt.Errorf("--allow %s has no effect: all of the internet is allowed; for nothing else, add --no-internet", allow[0])
	}
	for _, list := range []struct {
		flag   string
		action policy.Action
		rules  []string
	}{{"allow", policy.Direct, allow}, {"deny", policy.Deny, deny}} {
		for _, s := range list.rules {
			r, err := parseRule(s)
			r.Action = list.action
			if err == nil {
				err = validate(r, at(c).cfg)
			}
			if err != nil {
				return nil, fmt.Errorf("--%s %s: %w", list.flag, s, err)
			}
			p.Rules = append(p.Rules, r)
		}
	}
	// Rules that are good may be too many together.
	if _, err := policy.Compile(*p, policy.Guard{}); err != nil {
		return nil, err
	}
	return p, nil
}

// validate refuses a rule that can't be had, and one to allow what no policy opens.
func validate(r policy.Rule, cfg *config.Config) error {
	var g policy.Guard
	for _, o := range cfg.Network.Openings {
		g.Openings = append(g.Openings, policy.Opening(o))
	}
	rows, err := policy.Compile(policy.Policy{Rules: []policy.Rule{r}}, g)
	if err != nil || r.Action == policy.Deny {
		return err
	}
	for _, row := range rows {
		if row.Verdict.Rule != 0 || slices.ContainsFunc(row.Verdict.Ranges, func(r policy.Range) bool { return r.Rule != 0 }) {
			return nil
		}
	}
	return errors.New("no policy opens private and reserved addresses; the operator does, by network.openings of the configuration")
}

// parseRule takes ADDRESS[/BITS][:PORTS][/PROTOCOL] apart. Whether the parts are right is the policy compiler's to say.
func parseRule(s string) (r policy.Rule, err error) {
	const form = "a rule is ADDRESS[/BITS][:PORTS][/PROTOCOL], like 192.0.2.0/24:443,8000-8010/tcp"
	if strings.Count(s, ":") > 1 {
		return r, errors.New("IPv6 does not pass; " + form)
	}
	where, ports, hasPorts := strings.Cut(s, ":")
	address, rest, hasRest := strings.Cut(where, "/")
	r.To = address
	if bits, more, hasMore := strings.Cut(rest, "/"); hasRest && isNumber(bits) {
		r.To += "/" + bits
		rest, hasRest = more, hasMore
	}
	if hasPorts {
		if hasRest {
			return r, errors.New("the protocol comes after the ports; " + form)
		}
		ports, rest, hasRest = strings.Cut(ports, "/")
		r.Ports = strings.Split(ports, ",")
	}
	r.Protocol = rest
	if hasRest && rest == "" {
		return r, errors.New("there is no protocol after the last /; " + form)
	}
	return r, nil
}

func isNumber(s string) bool {
	_, err := strconv.ParseUint(s, 10, 32)
	return err == nil
}
