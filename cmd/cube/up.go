package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"github.com/containerd/console"
	"github.com/containerd/log"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/leftover"
	"github.com/cubesandbox/cube/orchestrator/stack"
)

// statusFD is the descriptor on which a daemon tells the `cube up -d` that started it how it gets on.
const statusFD = 3

func upCommand() *cli.Command {
	return &cli.Command{
		Name:  "up",
		Usage: "run the stack on this machine until SIGTERM; running sandboxes outlive it",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "detach", Aliases: []string{"d"}, Usage: "return when the stack is ready and leave it running"},
			&cli.BoolFlag{Name: "print-containerd-config", Usage: "print what an existing containerd's configuration needs, and do nothing"},
			&cli.BoolFlag{Name: "daemon", Hidden: true},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("up takes no arguments")
			}
			st := at(c)
			switch {
			case c.Bool("print-containerd-config"):
				b, err := stack.Snippet(st.cfg)
				if err != nil {
					return err
				}
				_, err = c.App.Writer.Write(b)
				return err
			case c.Bool("detach"):
				return st.detach(c)
			case c.Bool("daemon"):
				return st.daemon(c)
			}
			return st.up(c, sayTo(os.Stderr), func(summary string) {
				sayTo(os.Stderr)(summary)
				// Elsewhere a key would get into a log.
				if _, err := console.ConsoleFromFile(os.Stderr); err == nil {
					st.showFirstKey(c)
				}
			})
		},
	}
}

// up runs the stack in this process.
func (s *state) up(c *cli.Context, say, ready func(string)) error {
	if err := log.SetLevel(s.cfg.LogLevel); err != nil {
		return err
	}
	err := stack.Up(c.Context, s.cfg, stack.Options{
		Log: s.log, Version: c.App.Version, Progress: waiting(say),
		Ready: func(summary string) {
			ready(summary)
			s.logAttachments(c.Context)
		},
	})
	if err == nil {
		return nil
	}
	var ce *stack.ConfigError
	if errors.As(err, &ce) {
		fmt.Fprintf(os.Stderr, "%s", ce.Snippet)
	}
	return fmt.Errorf("up: %w", err)
}

// logAttachments tells how many places in the network the pods before have left.
func (s *state) logAttachments(ctx context.Context) {
	switch left, err := leftover.Attachments(ctx, s.cfg); {
	case err != nil:
		s.log.Warn("places in the network that nobody owns can't all be looked for", "error", err)
	case len(left) > 0:
		s.log.Warn("places in the network are left that nobody owns: `cube doctor` lists them, --fix frees them", "count", len(left))
	}
}

func waiting(say func(string)) func(string) func() {
	report := reporter(say)
	return func(what string) func() { return report("waiting for " + what) }
}

// status is one line from a daemon to who started it.
type status struct {
	Progress string `json:"progress,omitempty"`
	Ready    string `json:"ready,omitempty"`
	Error    string `json:"error,omitempty"`
	Snippet  string `json:"snippet,omitempty"`
}

// daemon runs the stack for a `cube up -d`, which listens on statusFD until the stack is ready.
func (s *state) daemon(c *cli.Context) error {
	unix.CloseOnExec(statusFD)
	pipe := os.NewFile(statusFD, "status")
	enc := json.NewEncoder(pipe)
	tell := func(st status) { _ = enc.Encode(st) } // the listener may have been interrupted
	err := s.up(c,
		func(line string) { tell(status{Progress: line}) },
		func(line string) {
			tell(status{Ready: line})
			_ = pipe.Close()
		})
	if err != nil {
		st := status{Error: err.Error()}
		var ce *stack.ConfigError
		if errors.As(err, &ce) {
			st.Snippet = string(ce.Snippet)
		}
		tell(st)
	}
	return err
}

// detach starts a daemon and stays until it is ready, has failed or is interrupted.
func (s *state) detach(c *cli.Context) error {
	logFile, err := stack.OpenLog(s.cfg)
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	defer logFile.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, "--log-level", s.cfg.LogLevel, "up", "--daemon")
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.ExtraFiles = []*os.File{w} // becomes statusFD
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		select {
		case <-c.Context.Done():
			_ = cmd.Process.Signal(unix.SIGTERM) // it undoes what it has done
		case <-ended:
		}
	}()
	defer close(ended)
	ready, err := s.listen(r)
	if ready {
		s.showFirstKey(c)
		return cmd.Process.Release()
	}
	return errors.Join(err, ignoreExit(cmd.Wait()))
}

// showFirstKey makes a key of the API where there has never been one, and shows it, which is the only time.
func (s *state) showFirstKey(c *cli.Context) {
	err := withDB(func(c *cli.Context, d *db.DB) error {
		keys, err := d.Keys(c.Context)
		if err != nil || len(keys) > 0 {
			return err
		}
		key, err := d.CreateKey(c.Context, db.DefaultTeam)
		if err != nil {
			return err
		}
		sayTo(os.Stderr)("the first key of the API, which isn't shown again: " + key)
		return recordKey(c, d, audit.KeyCreate, key)
	})(c)
	if err != nil {
		s.log.Warn("there is no key of the API: `cube key create` makes one", "error", err)
	}
}

// listen passes on what the daemon tells until it is ready or has failed.
func (s *state) listen(r io.Reader) (ready bool, err error) {
	say := sayTo(os.Stderr)
	dec := json.NewDecoder(r)
	for {
		var st status
		if err := dec.Decode(&st); err != nil {
			return false, fmt.Errorf("up: the daemon has ended: %s", stack.LogTail(s.cfg))
		}
		switch {
		case st.Ready != "":
			say(st.Ready)
			return true, nil
		case st.Error != "":
			fmt.Fprint(os.Stderr, st.Snippet)
			return false, errors.New(st.Error)
		case st.Progress != "":
			say(st.Progress)
		}
	}
}

// ignoreExit drops a command's exit code, whose reason is known already.
func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}
