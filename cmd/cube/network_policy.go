package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
)

func networkPolicyCommand() *cli.Command {
	return &cli.Command{
		Name:   "policy",
		Usage:  "show or replace what a container may reach",
		Action: noCommand("network policy"),
		Subcommands: []*cli.Command{
			{
				Name:      "get",
				Usage:     "show a container's policy",
				ArgsUsage: "ID",
				Flags:     []cli.Flag{&cli.BoolFlag{Name: "json", Usage: "as JSON, which set -f takes"}},
				Action:    withNetwork(1, oneContainer, policyGet),
			},
			{
				Name:      "set",
				Usage:     "replace a container's policy, for its open connections too",
				ArgsUsage: "ID",
				Description: "The policy is a file's, or what the other flags make; it replaces the former one whole. One of which an entry can't be\n" +
					"had is refused, and the former one stays.",
				Flags: append([]cli.Flag{
					&cli.StringFlag{Name: "file", Aliases: []string{"f"}, Usage: "take the policy from `FILE`, in JSON; - is stdin"},
					&cli.StringFlag{Name: "default", Usage: "`allow` or deny what no other flag is about; deny is the same as --no-internet"},
				}, policyFlags()...),
				Action: withNetwork(1, oneContainer, policySet),
			},
		},
	}
}

func policyGet(c *cli.Context, n *network.Network) error {
	a, err := attached(c, n)
	if err != nil {
		return err
	}
	if !a.Open {
		return fmt.Errorf("container %s has a tap that nobody has opened: it has no policy", c.Args().First())
	}
	w := c.App.Writer
	if c.Bool("json") {
		return writeJSON(w, a.Policy)
	}
	if a.Policy == nil {
		_, err := fmt.Fprintln(w, "no policy: nothing can be reached")
		return err
	}
	t := newTable(w, "RULE", "ACTION", "TO", "PORTS", "PROTOCOL")
	for i, r := range a.Policy.Rules {
		t.row(strconv.Itoa(i+1), r.Action.String(), r.To, orAny(strings.Join(r.Ports, ",")), orAny(r.Protocol))
	}
	t.row("default", a.Policy.Default.String(), "any", "any", "any")
	return t.flush()
}

func orAny(s string) string {
	if s == "" {
		return "any"
	}
	return s
}

func policySet(c *cli.Context, n *network.Network) error {
	p, err := wantedPolicy(c, os.Stdin)
	if err != nil {
		return err
	}
	a, err := attached(c, n)
	if err != nil {
		return err
	}
	return n.SetPolicy(c.Context, a.Key, p)
}

// wantedPolicy is what the command line says. nil is no policy, which is JSON's null.
func wantedPolicy(c *cli.Context, stdin io.Reader) (*policy.Policy, error) {
	flags := c.IsSet("default") || c.Bool("no-internet") || c.IsSet("allow") || c.IsSet("deny")
	switch {
	case c.IsSet("file") && flags:
		return nil, errors.New("-f goes with no other flag: all of the policy is in the file")
	case c.IsSet("file"):
		return readPolicy(c.String("file"), stdin)
	case !flags:
		return nil, errors.New("which policy? Use -f FILE, or --default, --no-internet, --allow and --deny")
	}
	byDefault := policy.Direct
	if c.IsSet("default") {
		switch s := c.String("default"); {
		case s == policy.Deny.String():
			byDefault = policy.Deny
		case s != policy.Direct.String():
			return nil, fmt.Errorf("--default %q is neither allow nor deny", s)
		case c.Bool("no-internet"):
			return nil, errors.New("--no-internet and --default allow contradict each other")
		}
	}
	return flaggedPolicy(c, byDefault)
}

// maxPolicyFile is room for as many rules as a policy can have, with some ports each.
const maxPolicyFile = 16 << 20

func readPolicy(name string, stdin io.Reader) (p *policy.Policy, err error) {
	r := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, maxPolicyFile+1))
	if err != nil {
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	if len(b) > maxPolicyFile {
		return nil, fmt.Errorf("%s is larger than a policy can be, %d MiB", name, maxPolicyFile>>20)
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}
