// Package pid1 is a sandbox's init: it starts the daemon, and again when it ends, runs the template's start command, collects
// what processes leave, and ends when it is told to. One goroutine does all of it.
package pid1

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/cgroups"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

const (
	// A daemon that ends is started again at once, and later each time it does so within a while.
	firstDelay = 100 * time.Millisecond
	lastDelay  = 5 * time.Second
	settled    = 30 * time.Second
	// grace is what processes get to end in after a SIGTERM. Who sends it has a time of its own.
	grace = 10 * time.Second
)

// Config is what the init starts.
type Config struct {
	Daemon  []string // arguments of this program
	User    string   // whom the command runs as
	Workdir string   // where; empty: the user's home
	Command []string // the template's start command; empty: none
}

// forwarded are the signals that are the start command's.
var forwarded = []os.Signal{unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH, unix.SIGCONT, unix.SIGTSTP}

// Run is the init. It returns when it was told to end and all others have ended, or their time was over.
func Run(c Config) error {
	if os.Getpid() != 1 {
		return errors.New("init is for PID 1 of a sandbox; without init, the daemon alone runs")
	}
	in := &initd{Config: c, delay: firstDelay}
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, append([]os.Signal{unix.SIGCHLD, unix.SIGTERM, unix.SIGINT}, forwarded...)...)
	if err := cgroups.Divide(cgroups.Root); err != nil {
		slog.Warn("the daemon isn't kept apart from what it runs", "error", err)
	}
	if group, err := cgroups.Open(cgroups.Root, cgroups.Commands); err == nil {
		in.commands = group
	}
	protect(1, "-1000")
	in.startDaemon()
	in.startCommand()
	for {
		select {
		case s := <-signals:
			switch s {
			case unix.SIGCHLD:
			case unix.SIGTERM, unix.SIGINT:
				if in.stopping {
					return nil
				}
				in.stop()
			default:
				in.forward(s.(syscall.Signal))
			}
			// One signal may stand for others that were sent at the time.
			if none := in.collect(); none && in.stopping {
				return nil
			}
		case <-in.again:
			in.startDaemon()
		case <-in.over:
			slog.Warn("processes have not ended in time", "grace", grace.String())
			return nil
		}
	}
}

type initd struct {
	Config
	commands *os.File // control group; nil: this process's

	daemon, command int // PIDs; 0: not running
	started         time.Time
	delay           time.Duration
	again           <-chan time.Time // the daemon is to be started
	stopping        bool
	over            <-chan time.Time // the time of the others
}

func (in *initd) startDaemon() {
	in.again, in.started = nil, time.Now()
	// The file that this program was started from may have been replaced.
	pid, err := in.start("/proc/self/exe", append([]string{"cube-envd"}, in.Daemon...), &syscall.ProcAttr{
		Env: os.Environ(), Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		slog.Error("the daemon can't be started", "error", err)
		in.later()
		return
	}
	in.daemon = pid
}

// later starts the daemon after a while.
func (in *initd) later() {
	if time.Since(in.started) >= settled {
		in.delay = firstDelay
	}
	in.again = time.After(in.delay)
	in.delay = min(2*in.delay, lastDelay)
}

// startCommand runs the start command. Without it, the sandbox is still one.
func (in *initd) startCommand() {
	if len(in.Command) == 0 {
		return
	}
	if err := in.runCommand(); err != nil {
		slog.Error("the start command can't be run", "command", in.Command[0], "error", err)
	}
}

func (in *initd) runCommand() error {
	u, err := users.System.Lookup(in.User)
	if err != nil {
		return err
	}
	dir, err := u.Resolve(in.Workdir, "")
	if err != nil {
		return err
	}
	env := append(os.Environ(), "HOME="+u.Home, "USER="+u.Name, "LOGNAME="+u.Name)
	path, err := users.FindCommand(in.Command[0], dir, os.Getenv("PATH"))
	if err != nil {
		return err
	}
	attr := &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}}
	if in.commands != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(in.commands.Fd())
	}
	pid, err := in.start(path, in.Command, &syscall.ProcAttr{Dir: dir, Env: env, Sys: attr})
	if err != nil {
		return err
	}
	protect(pid, "100")
	in.command = pid
	return nil
}

// start starts a program that writes where this one does.
func (in *initd) start(path string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	attr.Files = []uintptr{null.Fd(), os.Stdout.Fd(), os.Stderr.Fd()}
	if pid, err = syscall.ForkExec(path, args, attr); err != nil {
		return 0, &os.PathError{Op: "start", Path: path, Err: err}
	}
	return pid, nil
}

// protect says how soon the kernel kills a process when memory is short: -1000 is never.
func protect(pid int, score string) {
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(score), 0); err != nil {
		slog.Warn("what is killed when memory is short is as the kernel likes", "pid", pid, "error", err)
	}
}

// collect reaps what has ended, and says whether no child is left.
func (in *initd) collect() (none bool) {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil: // ECHILD
			return true
		case pid == 0:
			return false
		default:
			in.ended(pid, status)
		}
	}
}

func (in *initd) ended(pid int, status unix.WaitStatus) {
	switch pid {
	case in.daemon:
		in.daemon = 0
		if !in.stopping {
			slog.Error("the daemon has ended and is started again", "after", in.delay.String(), "how", how(status))
			in.later()
		}
	case in.command:
		in.command = 0
		slog.Info("the start command has ended", "how", how(status))
	}
}

func how(s unix.WaitStatus) string {
	if s.Signaled() {
		return "signal: " + s.Signal().String()
	}
	return fmt.Sprintf("exit status %d", s.ExitStatus())
}

// forward sends a signal to the start command and its group.
func (in *initd) forward(s syscall.Signal) {
	if in.command != 0 {
		_ = unix.Kill(-in.command, s)
	}
}

// stop tells all processes to end.
func (in *initd) stop() {
	in.stopping, in.again, in.over = true, nil, time.After(grace)
	_ = unix.Kill(-1, unix.SIGTERM)
}
