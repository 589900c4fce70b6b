package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
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

// commandLine is what a process was started with; nil when it is gone or a kernel thread.
func commandLine(pid int) []string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return nil
	}
	var argv []string
	for arg := range bytes.SplitSeq(bytes.TrimSuffix(b, []byte{0}), []byte{0}) {
		argv = append(argv, string(arg))
	}
	return argv
}

// findProcesses takes hold of the processes whose command lines match. A command line is read again once its process is
// held, since the number may have passed on in between.
func findProcesses(match func(argv []string) bool) ([]*process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []*process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !match(commandLine(pid)) {
			continue
		}
		p, err := openProcess(pid)
		if err != nil {
			continue // it has ended
		}
		if match(commandLine(pid)) {
			found = append(found, p)
		} else {
			go p.close()
		}
	}
	return found, nil
}
