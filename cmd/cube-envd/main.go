// Command cube-envd is the daemon of a sandbox that E2B's SDKs talk to and, as "cube-envd init", the sandbox's PID 1. As "cube-envd
// sftp-server" it serves SFTP on its stdin and stdout, as who runs it. As "cube-envd unpack" and "cube-envd complete" it does what
// builds of templates need in a sandbox's disk.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"

	"github.com/pkg/sftp"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd"
	"github.com/cubesandbox/cube/guest-agent/envd/pid1"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
)

func main() {
	// Lines of JSON are what the control plane takes apart for the sandbox's log.
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cube-envd:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) > 0 && args[0] == "init" {
		return runInit(args[1:])
	}
	if len(args) == 1 && args[0] == "sftp-server" {
		return serveSFTP()
	}
	if len(args) > 0 && args[0] == "unpack" {
		return unpackFiles(args[1:])
	}
	if len(args) > 0 && args[0] == "complete" {
		return completeDisk(args[1:])
	}
	c := envd.Config{}
	flags := flag.NewFlagSet("cube-envd", flag.ExitOnError)
	defaults(flags, &c.User, &c.Workdir)
	flags.StringVar(&c.Address, "listen", fmt.Sprintf(":%d", envd.Port), "`address` to serve on")
	flags.BoolVar(&c.Sandbox, "sandbox", false, "the machine is a sandbox of its own: set its clock, hand the environment on")
	_ = flags.Parse(args)
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	return envd.Run(ctx, c)
}

// stdio is a client at stdin and stdout.
type stdio struct {
	io.Reader
	io.Writer
}

// Close is of io.Closer; both end with the process.
func (stdio) Close() error { return nil }

// serveSFTP serves files from the working directory, until the client goes.
func serveSFTP() error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	server, err := sftp.NewServer(stdio{os.Stdin, os.Stdout}, sftp.WithServerWorkingDirectory(dir))
	if err != nil {
		return err
	}
	if err := server.Serve(); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func runInit(args []string) error {
	c := pid1.Config{}
	flags := flag.NewFlagSet("cube-envd init", flag.ExitOnError)
	defaults(flags, &c.User, &c.Workdir)
	_ = flags.Parse(args)
	c.Command = flags.Args()
	c.Daemon = []string{"-sandbox", "-user", c.User, "-workdir", c.Workdir}
	if err := settings.Forget(envd.Dir); err != nil {
		return err
	}
	return pid1.Run(c)
}

// defaults are what commands have whose callers don't say.
func defaults(flags *flag.FlagSet, user, workdir *string) {
	flags.StringVar(user, "user", "root", "`name` of the user that commands run as by default")
	flags.StringVar(workdir, "workdir", "", "`directory` they run in by default (the user's home)")
}
