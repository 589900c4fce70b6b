package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// processFlags are those of run and exec.
func processFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "tty", Aliases: []string{"t"}, Usage: "give it a terminal"},
		&cli.BoolFlag{Name: "interactive", Aliases: []string{"i"}, Usage: "give it this stdin"},
		&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "set `KEY=VALUE`, or take KEY's value from here; may be repeated"},
		&cli.StringFlag{Name: "workdir", Aliases: []string{"w"}, Usage: "its working directory"},
		&cli.StringFlag{Name: "user", Aliases: []string{"u"}, Usage: "run as `USER`: name, uid or uid:gid"},
	}
}

func runCommand() *cli.Command {
	return &cli.Command{
		Name:      "run",
		Usage:     "run a container in a machine of its own",
		ArgsUsage: "IMAGE [COMMAND [ARG...]]",
		Description: "The exit code is the container's, or 125 when it couldn't be run. With -d stdout gets the container's id; its\n" +
			"output goes to a file that `cube logs` reads.\n\n" +
			"The container reaches the internet, and of the host and of private networks only what the operator has opened. With\n" +
			"--deny it doesn't reach what that says, unless --allow says so; with --no-internet only what --allow says. What is\n" +
			"allowed beats what is denied, whatever the order. In all cases the host's DNS forwarder looks names up for it, but for\n" +
			"--network none.",
		Flags: slices.Concat([]cli.Flag{
			&cli.BoolFlag{Name: "detach", Aliases: []string{"d"}, Usage: "return when it runs"},
			&cli.BoolFlag{Name: "rm", Usage: "remove the container when it has ended"},
			&cli.StringFlag{Name: "name", Aliases: []string{"id"}, Usage: "the container's `ID` (default: a random one)"},
			&cli.Float64Flag{Name: "cpus", Usage: "how many CPUs it may use; its machine has as many, rounded up"},
			&cli.StringFlag{Name: "memory", Aliases: []string{"m"}, Usage: "how much memory it may use, like 512MiB"},
			&cli.StringFlag{Name: "disk", Usage: "how large its root disk is, like 20GiB; at least as large as the image's"},
			&cli.StringSliceFlag{Name: "volume", Aliases: []string{"v"}, Usage: "show the host's file or directory at a path of the container, `SOURCE:PATH[:ro]`; may be repeated"},
			&cli.StringSliceFlag{Name: "annotation", Usage: "set `KEY=VALUE` in its spec; may be repeated"},
			&cli.StringFlag{Name: "entrypoint", Usage: "run this instead of the image's entrypoint and command"},
		}, runNetworkFlags(), processFlags()),
		Action: func(c *cli.Context) error { return failed(runAction(c)) },
	}
}

func runAction(c *cli.Context) error {
	if c.NArg() == 0 {
		return errors.New("run: which image? `cube image ls` lists those that are here")
	}
	if c.Bool("detach") && (c.Bool("rm") || c.Bool("interactive")) {
		return errors.New("run: -d goes with neither --rm nor -i")
	}
	spec, err := runSpec(c)
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	client, err := sandbox.Connect(c.Context, at(c).cfg)
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	defer client.Close()
	progress := sandbox.Progress(reporter(sayTo(os.Stderr)))
	if c.Bool("detach") {
		id, err := client.RunDetached(c.Context, spec, progress)
		if err == nil {
			fmt.Fprintln(c.App.Writer, id)
		}
		if err = recorded(c, audit.Create, cmp.Or(id, spec.ID), err); err != nil {
			return fmt.Errorf("run: %w", err)
		}
		return nil
	}
	code, err := client.Run(c.Context, spec, stdio(c), c.Bool("rm"), progress)
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	return exited(code)
}

// runSpec makes a request of the command line.
func runSpec(c *cli.Context) (sandbox.Spec, error) {
	s := sandbox.Spec{
		ID:      c.String("name"),
		Image:   c.Args().First(),
		Process: process(c, c.Args().Tail()),
		CPUs:    c.Float64("cpus"),
	}
	if c.IsSet("entrypoint") {
		e := c.String("entrypoint")
		s.Entrypoint = &e
	}
	for flag, to := range map[string]*int64{"memory": &s.Memory, "disk": &s.Disk} {
		if v := c.String(flag); v != "" {
			n, err := units.RAMInBytes(v)
			if err != nil || n <= 0 {
				return s, fmt.Errorf("--%s %q is not a size: use for example 512MiB", flag, v)
			}
			*to = n
		}
	}
	if c.IsSet("cpus") && s.CPUs <= 0 {
		return s, fmt.Errorf("--cpus %v must be above 0", s.CPUs)
	}
	for _, v := range c.StringSlice("volume") {
		m, err := volume(v)
		if err != nil {
			return s, err
		}
		s.Mounts = append(s.Mounts, m)
	}
	for _, a := range c.StringSlice("annotation") {
		k, v, ok := strings.Cut(a, "=")
		if !ok || k == "" {
			return s, fmt.Errorf("--annotation %q is not KEY=VALUE", a)
		}
		if s.Annotations == nil {
			s.Annotations = make(map[string]string)
		}
		s.Annotations[k] = v
	}
	var err error
	s.Network, err = runNetwork(c)
	return s, err
}

// volume parses SOURCE:PATH[:ro|:rw]. A relative source counts from here.
func volume(v string) (m sandbox.Mount, err error) {
	parts := strings.Split(v, ":")
	access := "rw"
	if len(parts) == 3 {
		access = parts[2]
	}
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || !path.IsAbs(parts[1]) || access != "rw" && access != "ro" {
		return m, fmt.Errorf("--volume %q is not SOURCE:PATH or SOURCE:PATH:ro with an absolute path of the container", v)
	}
	m = sandbox.Mount{Destination: parts[1], ReadOnly: access == "ro"}
	if m.Source, err = filepath.Abs(parts[0]); err != nil {
		return m, err
	}
	if _, err := os.Stat(m.Source); err != nil {
		return m, fmt.Errorf("--volume %s: %w", v, err)
	}
	return m, nil
}

// process is what the command line says of the process.
func process(c *cli.Context, args []string) sandbox.Process {
	p := sandbox.Process{Args: args, Cwd: c.String("workdir"), User: c.String("user"), TTY: c.Bool("tty")}
	for _, e := range c.StringSlice("env") {
		if !strings.Contains(e, "=") {
			v, ok := os.LookupEnv(e)
			if !ok {
				continue
			}
			e += "=" + v
		}
		p.Env = append(p.Env, e)
	}
	return p
}

// stdio is what a process in the foreground is attached to.
func stdio(c *cli.Context) sandbox.Stdio {
	s := sandbox.Stdio{Out: os.Stdout, Err: os.Stderr}
	if c.Bool("interactive") {
		s.In = os.Stdin
	}
	return s
}

func execCommand() *cli.Command {
	return &cli.Command{
		Name:        "exec",
		Usage:       "run a further process in a running container",
		ArgsUsage:   "ID COMMAND [ARG...]",
		Description: "The exit code is the process's, or 125 when it couldn't be run.",
		Flags:       processFlags(),
		Action:      func(c *cli.Context) error { return failed(execAction(c)) },
	}
}

func execAction(c *cli.Context) error {
	if c.NArg() < 2 {
		return errors.New("exec: it takes a container and a command: `cube ps` lists what runs")
	}
	client, err := sandbox.Connect(c.Context, at(c).cfg)
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	defer client.Close()
	code, err := client.Exec(c.Context, c.Args().First(), process(c, c.Args().Tail()), stdio(c))
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	return exited(code)
}

// exited passes a process's exit code on.
func exited(code int) error {
	if code == 0 {
		return nil
	}
	return exitCode(code)
}

// failed gives an error of cube's own the code that tells it from the process's.
func failed(err error) error {
	var exit exitCode
	if err == nil || errors.As(err, &exit) {
		return err
	}
	return &failure{error: err, code: codeFailed}
}
