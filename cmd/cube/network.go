package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/ports"
)

func networkCommand() *cli.Command {
	return &cli.Command{
		Name:  "network",
		Usage: "look at the containers' network, and set what they may reach",
		Description: "An ID is a container's as `cube ps` shows it, or NAMESPACE/ID, or what CNI plugins are told. The commands take root and\n" +
			"work on what is in force, whether the stack's daemon runs or not.",
		Action: noCommand("network"),
		Subcommands: []*cli.Command{
			{
				Name:        "status",
				Usage:       "tell what there is of the network, and what isn't as it should be",
				Description: "The exit code is 0 when containers get all of it.",
				Flags:       []cli.Flag{jsonFlag()},
				Action:      withNetwork(0, "no arguments", networkStatus),
			},
			networkPolicyCommand(),
			{
				Name:      "flows",
				Usage:     "list what a container has open",
				ArgsUsage: "ID",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "list them again and again, until interrupted"},
					jsonFlag(),
				},
				Action: withNetwork(1, oneContainer, networkFlows),
			},
			{
				Name:      "drops",
				Usage:     "tell what of a container's packets was dropped, and why",
				ArgsUsage: "ID",
				Flags:     []cli.Flag{jsonFlag()},
				Action:    withNetwork(1, oneContainer, networkDrops),
			},
			{
				Name:      "trace",
				Usage:     "tell what becomes of a container's packets to a destination",
				ArgsUsage: "ID ADDRESS[:PORT][/PROTOCOL]",
				Description: "The protocol is tcp where there is a port, and icmp where there is none. Nothing is sent: it is what the policy, the\n" +
					"kernel's tables and the host's firewall say. The exit code is 0 when nothing of that is in the way.",
				Flags:  []cli.Flag{jsonFlag()},
				Action: withNetwork(2, "a container and a destination", networkTrace),
			},
		},
	}
}

// oneContainer is what most of them take.
const oneContainer = "one container, and flags before it"

func jsonFlag() cli.Flag { return &cli.BoolFlag{Name: "json", Usage: "as JSON"} }

// noCommand is the action of a command that only has others below it.
func noCommand(name string) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.NArg() > 0 {
			return fmt.Errorf("%s: there is no command %q: `cube %[1]s --help` lists them", name, c.Args().First())
		}
		return cli.ShowSubcommandHelp(c)
	}
}

// withNetwork runs f with what the configuration's network is worked on by, and says for which command an error is.
func withNetwork(args int, takes string, f func(*cli.Context, *network.Network) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		name := strings.TrimPrefix(c.Command.HelpName, "cube ")
		err := errors.New("it takes " + takes)
		switch {
		case c.NArg() != args:
		case os.Geteuid() != 0:
			err = errors.New("it takes root: use sudo")
		default:
			err = f(c, network.New(at(c).cfg))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
}

// attached finds the container that the first argument names.
func attached(c *cli.Context, n *network.Network) (*network.Attachment, error) {
	return n.Find(c.Context, at(c).cfg.Containerd.Namespace, c.Args().First())
}

// networkState is what status tells.
type networkState struct {
	*network.Overview
	// Daemon says whether it answers: without it no names are looked up, and no port of the host leads to a container.
	Daemon bool          `json:"daemon"`
	Ports  []ports.State `json:"ports"`
}

// askTimeout bounds a question to the daemon.
const askTimeout = 5 * time.Second

func networkStatus(c *cli.Context, n *network.Network) error {
	o, err := n.Overview(c.Context)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(c.Context, at(c).cfg.Timeout(askTimeout))
	defer cancel()
	st := networkState{Overview: o}
	var daemon error
	if st.Ports, daemon = ports.List(ctx, at(c).cfg.ControlSocket(), ""); daemon != nil && !errdefs.IsUnavailable(daemon) {
		return daemon
	}
	st.Daemon = daemon == nil
	if c.Bool("json") {
		err = writeJSON(c.App.Writer, st)
	} else {
		err = writeState(c.App.Writer, st)
	}
	if err != nil {
		return err
	}
	if err := n.Status(c.Context); err != nil {
		return err
	}
	return daemon
}

func writeState(w io.Writer, st networkState) error {
	t := fields(w)
	t.row("gateway", fmt.Sprintf("%s, %s, MTU %d", st.Device, st.Address, st.MTU))
	t.row("uplink", orNone(strings.Join(st.Uplink, ", ")))
	t.row("pool", st.Pool.String())
	t.row("hook", orNone(st.Hook))
	t.row("containers", fmt.Sprintf("%d open, %d closed", st.Open, st.Closed))
	t.row("warm taps", fmt.Sprint(st.Warm))
	if st.Daemon {
		t.row("daemon", "running")
	} else {
		t.row("daemon", "not running: no names are looked up, and no port of the host leads to a container")
	}
	for _, p := range st.Ports {
		why := ""
		if p.Reason != "" {
			why = ", which isn't served: " + p.Reason
		}
		t.row("port", fmt.Sprintf("%s to %d of %s%s", p.Port, p.ContainerPort, p.ID, why))
	}
	for _, f := range st.Findings {
		t.row(string(f.Level), strings.TrimSuffix(f.Detail+"; "+f.Remedy, "; "))
	}
	return t.flush()
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
