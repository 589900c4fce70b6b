// Command cube-envd is the daemon of a sandbox that E2B's SDKs talk to and, as "cube-envd init", the sandbox's PID 1.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd"
)

func main() {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cube-envd:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	c := envd.Config{}
	flags := flag.NewFlagSet("cube-envd", flag.ExitOnError)
	flags.StringVar(&c.Address, "listen", fmt.Sprintf(":%d", envd.Port), "`address` to serve on")
	flags.StringVar(&c.User, "user", "root", "`name` of the user that commands run as by default")
	flags.StringVar(&c.Workdir, "workdir", "", "`directory` they run in by default (the user's home)")
	flags.BoolVar(&c.Sandbox, "sandbox", false, "the machine is a sandbox of its own: set its clock, hand the environment on")
	_ = flags.Parse(args)
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	return envd.Run(ctx, c)
}
