// Command cube runs Cube on this machine (up, down, doctor) and handles its containers and images. What it makes it
// names on stdout, one id per line; everything else goes to stderr, an error as one line.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/containerd/log"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

const (
	// codeFailed is the exit code of `cube run` and `cube exec` when it is they that failed, as with docker: other
	// codes are the process's.
	codeFailed = 125
	// codeInterrupted is a shell's code for SIGINT.
	codeInterrupted = 128 + 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	code := runApp(ctx, newApp(), os.Args, os.Stderr)
	stop()
	os.Exit(code)
}

// runApp runs a command line, says on stderr what went wrong and returns the exit code.
func runApp(ctx context.Context, app *cli.App, args []string, stderr io.Writer) int {
	err := app.RunContext(ctx, flagsFirst(app, args))
	var exit exitCode
	var failed *failure
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return int(exit)
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "cube: interrupted")
		return codeInterrupted
	case errors.As(err, &failed):
		fmt.Fprintln(stderr, "cube:", oneLine(failed.Error()))
		return failed.code
	}
	fmt.Fprintln(stderr, "cube:", oneLine(err.Error()))
	return 1
}

// exitCode is the code of a process that cube has run: nothing to report.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// failure is an error with an exit code of its own.
type failure struct {
	error
	code int
}

func (f *failure) Unwrap() error { return f.error }

// oneLine makes one line of a message that quotes others' output.
func oneLine(s string) string {
	var parts []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" {
			parts = append(parts, line)
		}
	}
	return strings.Join(parts, " | ")
}

// state is what the global flags have made, for the commands.
type state struct {
	cfg *config.Config
	log *slog.Logger
	// clientLog is quieter than log, unless a level was asked for: for commands whose errors say all.
	clientLog *slog.Logger
}

// at is the state of a command's context.
func at(c *cli.Context) *state { return c.App.Metadata["state"].(*state) }

func newApp() *cli.App {
	st := &state{}
	app := &cli.App{
		Name:                      "cube",
		Usage:                     "run containers in microVMs of their own",
		Version:                   version(),
		HideHelpCommand:           true,
		UseShortOptionHandling:    true,
		DisableSliceFlagSeparator: true,
		Metadata:                  map[string]any{"state": st},
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "config", Usage: "configuration `FILE` (default: $CUBE_CONFIG, then " + config.DefaultFile + ")"},
			&cli.StringFlag{Name: "log-level", Usage: "debug, info, warn or error, instead of log_level of the configuration"},
		},
		Before:         func(c *cli.Context) error { return st.load(c.String("config"), c.String("log-level")) },
		OnUsageError:   usageError,
		ExitErrHandler: func(*cli.Context, error) {}, // run reports errors
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return fmt.Errorf("there is no command %q: `cube --help` lists them", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
		Commands: []*cli.Command{
			upCommand(), downCommand(), statusCommand(), doctorCommand(),
			runCommand(), execCommand(), psCommand(), logsCommand(), stopCommand(), rmCommand(), imageCommand(),
			snapshotCommand(), pauseCommand(), resumeCommand(), cloneCommand(), rollbackCommand(), dfCommand(), pruneCommand(), capacityCommand(), networkCommand(),
			templateCommand(), keyCommand(), teamCommand(), auditCommand(), caCommand(), sshCommand(), portForwardCommand(), batchCommand(), benchCommand(), proxyCommand(),
		},
	}
	for _, c := range app.Commands {
		prepare(c)
	}
	return app
}

// prepare gives a command what all commands have.
func prepare(c *cli.Command) {
	c.OnUsageError = usageError
	c.UseShortOptionHandling = true
	c.HideHelpCommand = true
	for _, sub := range c.Subcommands {
		prepare(sub)
	}
}

func usageError(c *cli.Context, err error, _ bool) error {
	return fmt.Errorf("%w: `%s --help` says how it is used", err, c.Command.HelpName)
}

// sbin is where mkfs and its like are, which the PATH of an unprivileged login that became root may lack.
const sbin = "/usr/local/sbin:/usr/sbin:/sbin"

// load reads the configuration and sets the logging up.
func (s *state) load(file, level string) error {
	if err := os.Setenv("PATH", os.Getenv("PATH")+":"+sbin); err != nil {
		return err
	}
	if file == "" {
		file = os.Getenv(config.FileEnv)
	}
	if file != "" {
		// The daemons and shims that this process starts read it too, in directories of their own.
		abs, err := filepath.Abs(file)
		if err != nil {
			return err
		}
		if err := os.Setenv(config.FileEnv, abs); err != nil {
			return err
		}
	}
	cfg, err := config.Load("")
	if err != nil {
		return err
	}
	if level != "" {
		cfg.LogLevel = level
	}
	var l slog.Level
	if err := l.UnmarshalText([]byte(cfg.LogLevel)); err != nil {
		return fmt.Errorf("log level %q must be debug, info, warn or error", cfg.LogLevel)
	}
	s.cfg = cfg
	s.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l}))
	if level == "" && l < slog.LevelWarn {
		l = slog.LevelWarn // the configured level is the daemons'
	}
	s.clientLog = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l}))
	// containerd's client library has a logger of its own, whose warnings the errors repeat.
	library := "fatal"
	if l <= slog.LevelDebug {
		library = "debug"
	}
	return log.SetLevel(library)
}

// version is this program's, from its build.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = s.Value
		}
	}
	return v
}
