package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/bpf/policy"
)

// policyFlags are those of run and network policy set.
func policyFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "no-internet", Usage: "let it reach nothing but what --allow says, and the host's DNS forwarder"},
		&cli.StringSliceFlag{Name: "allow", Usage: "let it reach `ADDRESS[/BITS][:PORTS][/PROTOCOL]`, like 192.0.2.0/24:443,8000-8010/tcp, of what --no-internet or --deny keep from it; may be repeated"},
		&cli.StringSliceFlag{Name: "deny", Usage: "keep `ADDRESS[/BITS][:PORTS][/PROTOCOL]` of the internet from it; may be repeated"},
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
			if err == nil {
				r.Action = list.action
				_, err = policy.Compile(policy.Policy{Rules: []policy.Rule{r}}, policy.Guard{})
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
