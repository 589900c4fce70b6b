package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
)

// stopTimeout bounds how long a daemon may take to stop before it is killed.
const stopTimeout = 10 * time.Second

// maxLog is the size in bytes at which a daemon's log is set aside when the daemon starts; one old log is kept.
const maxLog = 16 << 20

// daemon is the private containerd: started by us or by a `cube up` before us.
type daemon struct {
	proc    *process
	log     string        // its log file
	logFrom int64         // where this life's part of the log begins
	adopted bool          // a process before us started it
	exit    <-chan string // how it ended, once it has; an adopted one doesn't say
	notify  *net.UnixConn // nil for an adopted one
}

// adoptOrLaunch starts the private containerd, or adopts the one that a killed `cube up` has left, and returns it
// when it serves. On error nothing is left running.
func adoptOrLaunch(ctx context.Context, cfg *config.Config) (*daemon, error) {
	want, err := containerdConfig(cfg)
	if err != nil {
		return nil, err
	}
	running, err := findContainerd(cfg)
	if err != nil {
		return nil, err
	}
	if running == nil {
		return launchContainerd(ctx, cfg, want)
	}
	have, err := os.ReadFile(containerdConfigPath(cfg))
	if err != nil || !bytes.Equal(have, want) {
		return nil, fmt.Errorf("the containerd of an earlier `cube up` still runs as process %d, with another configuration; `cube down` stops it", running.pid)
	}
	return &daemon{proc: running, adopted: true, log: containerdLog(cfg), logFrom: size(containerdLog(cfg))}, nil
}

// findContainerd takes hold of the private containerd, nil when it doesn't run. It is known by the configuration file
// on its command line, which is this run directory's: a pid file would miss a kill between start and write.
func findContainerd(cfg *config.Config) (*process, error) {
	file := containerdConfigPath(cfg)
	found, err := findProcesses(func(argv []string) bool {
		return len(argv) == 3 && filepath.Base(argv[0]) == "containerd" && argv[1] == "--config" && argv[2] == file
	})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[0], nil // there can't be two: they lock their data
}

func launchContainerd(ctx context.Context, cfg *config.Config, conf []byte) (_ *daemon, err error) {
	var u undo.Stack
	defer u.Run(&err)

	bin := cfg.Bin("containerd")
	if _, err := os.Stat(bin); err != nil {
		return nil, fmt.Errorf("no containerd: %w; `make setup` builds it, or set containerd.address", err)
	}
	if err := os.WriteFile(containerdConfigPath(cfg), conf, 0o600); err != nil {
		return nil, fmt.Errorf("write containerd's configuration: %w", err)
	}
	if err := finishDeletions(cfg); err != nil {
		return nil, err
	}
	notify, err := listenNotify(filepath.Join(cfg.RunDir, "notify.sock"))
	if err != nil {
		return nil, err
	}
	u.Push(notify.Close)
	d := &daemon{log: containerdLog(cfg), notify: notify}
	out, err := openLog(d.log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	d.logFrom = size(d.log)

	cmd := exec.Command(bin, "--config", containerdConfigPath(cfg))
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(),
		"PATH="+cfg.BinDir+":"+os.Getenv("PATH"), // where it looks for the shims and runc
		"NOTIFY_SOCKET="+notify.LocalAddr().String())
	// In a session of its own, so that a Ctrl-C for `cube up` isn't one for the shims that it starts.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start containerd: %w", err)
	}
	if d.proc, err = openProcess(cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		return nil, errors.Join(err, cmd.Wait())
	}
	exit := make(chan string, 1)
	d.exit = exit
	go func() {
		_ = cmd.Wait()
		exit <- cmd.ProcessState.String()
	}()
	u.Push(func() error {
		defer d.proc.close()
		return d.proc.stop(expired)
	})

	select {
	case err := <-started(notify):
		return d, err
	case <-d.proc.done:
		return nil, fmt.Errorf("containerd has ended: %s", d.death())
	case <-ctx.Done():
		return nil, fmt.Errorf("containerd doesn't come up: %w: %s", ctx.Err(), d.tail())
	}
}

// finishDeletions removes the bundles that a containerd was removing when it was killed. It gives a bundle a hidden name
// first; where there is one of that name, it can't remove another of the same id, and the id can't be used again.
func finishDeletions(cfg *config.Config) error {
	var errs []error
	for _, dir := range []string{ContainerdState(cfg), containerdRoot(cfg)} {
		hidden, _ := filepath.Glob(filepath.Join(dir, "io.containerd.runtime.v2.task", "*", ".*")) // the pattern is well-formed
		for _, path := range hidden {
			errs = append(errs, os.RemoveAll(path)) // nothing is mounted in it any more
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove what containerd was removing: %w", err)
	}
	return nil
}

// listenNotify makes the socket on which containerd says that it serves (sd_notify(3)).
func listenNotify(path string) (*net.UnixConn, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("make containerd's notify socket: %w", err)
	}
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("make containerd's notify socket: %w", err)
	}
	return c, nil
}

// started receives nil when READY=1 has come, or an error when the socket is closed before.
func started(notify *net.UnixConn) <-chan error {
	c := make(chan error, 1)
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := notify.Read(buf)
			if err != nil {
				c <- fmt.Errorf("wait for containerd: %w", err)
				return
			}
			for line := range strings.SplitSeq(string(buf[:n]), "\n") {
				if line == "READY=1" {
					c <- nil
					return
				}
			}
		}
	}()
	return c
}

// stop ends containerd; its shims and their machines go on.
func (d *daemon) stop(ctx context.Context) error {
	err := d.proc.stop(ctx)
	d.close()
	return err
}

// close lets go of a containerd that has ended.
func (d *daemon) close() {
	if d.notify != nil {
		_ = d.notify.Close()
		_ = os.Remove(d.notify.LocalAddr().String())
	}
	d.proc.close()
}

// death says how it ended, with its last words.
func (d *daemon) death() string {
	if d.exit == nil { // only its parent could know
		return d.tail()
	}
	return <-d.exit + ": " + d.tail()
}

// tail is the end of what this life of containerd has logged, on one line.
func (d *daemon) tail() string { return logTail(d.log, d.logFrom) }

// expired is a context that has ended: stop kills at once with it.
var expired = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func containerdLog(cfg *config.Config) string { return filepath.Join(cfg.LogDir(), "containerd.log") }

// openLog opens a daemon's log for appending; a big one is set aside first.
func openLog(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	if size(path) > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, fmt.Errorf("set log aside: %w", err)
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

// size is a file's, 0 when there is none.
func size(path string) int64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Size
}
