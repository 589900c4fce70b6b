package stack

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	proc "github.com/cubesandbox/cube/internal/process"
)

// process is a process, ours or not, held by its pidfd: once open, its number can't come to mean another one.
type process struct {
	pid  int
	fd   int
	done chan struct{} // closed when it has ended
}

// openProcess takes hold of a running process.
func openProcess(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	p := &process{pid: pid, fd: fd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	return p, nil
}

func (p *process) signal(s unix.Signal) error {
	err := unix.PidfdSendSignal(p.fd, s, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// stop sends SIGTERM and, when ctx ends first, SIGKILL. It returns when the process has ended.
func (p *process) stop(ctx context.Context) error {
	if err := p.signal(unix.SIGTERM); err != nil {
		return fmt.Errorf("stop process %d: %w", p.pid, err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
	}
	if err := p.signal(unix.SIGKILL); err != nil {
		return fmt.Errorf("kill process %d: %w", p.pid, err)
	}
	<-p.done
	return nil
}

// close lets go of the process. It must have ended: until then the watcher uses the descriptor.
func (p *process) close() {
	<-p.done
	_ = unix.Close(p.fd)
}

// findProcesses takes hold of the processes whose command lines match.
func findProcesses(match func(argv []string) bool) ([]*process, error) {
	all, err := proc.Find(match)
	if err != nil {
		return nil, err
	}
	var found []*process
	for _, f := range all {
		p, err := openProcess(f.PID)
		if err != nil {
			continue // it has ended
		}
		if f.Alive() { // looked at after the open: the one that was found is held
			found = append(found, p)
		} else {
			go p.close()
		}
	}
	return found, nil
}

// Shims lists the shims of this stack's containerd, whether it knows them or not.
func Shims(cfg *config.Config) ([]proc.Found, error) {
	return proc.Find(func(argv []string) bool { return isShim(cfg, argv) })
}

// isShim says whether a command line is that of a shim which this stack's containerd has started.
func isShim(cfg *config.Config, argv []string) bool {
	i := slices.Index(argv, "-address")
	return i > 0 && i+1 < len(argv) && argv[i+1] == cfg.ContainerdSocket() && filepath.Base(argv[0]) == "containerd-shim-cube-v2"
}
