package container

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/crun"
	"github.com/cubesandbox/cube/guest-agent/agent/reap"
	"github.com/cubesandbox/cube/guest-agent/agent/stdio"
)

// lostStatus stands for a status that nobody knows.
const lostStatus = 255

// process is a process that the host asked for: a container's first (id "") or a further one.
type process struct {
	id       string
	pid      int
	io       *stdio.Process
	terminal bool
	pidfd    *os.File // nil when it had ended before it could be opened
}

// adopt couples what crun has started with its streams.
func adopt(id string, started *crun.Started, io *stdio.Process, terminal bool) (*process, error) {
	p := &process{id: id, pid: started.PID, io: io, terminal: terminal}
	if started.Terminal != nil {
		io.Attach(started.Terminal)
	}
	fd, err := unix.PidfdOpen(p.pid, 0)
	switch {
	case err == nil:
		p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	case !errors.Is(err, unix.ESRCH):
		return nil, fmt.Errorf("open process %d: %w", p.pid, err)
	}
	return p, nil
}

// signal sends a signal; a process that has ended isn't found.
func (p *process) signal(sig unix.Signal) error {
	err := error(unix.ESRCH)
	if p.pidfd != nil {
		var raw error
		if conn, e := p.pidfd.SyscallConn(); e == nil {
			raw = conn.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
		}
		if raw != nil { // closed meanwhile
			err = unix.ESRCH
		}
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("process already finished: %w", errdefs.ErrNotFound)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%d is no signal: %w", sig, errdefs.ErrInvalidArgument)
	}
	return fmt.Errorf("signal process %d: %w", p.pid, err)
}

// lostTimeout is how long the exit of a process that has ended may take to be collected.
const lostTimeout = 5 * time.Second

// await waits for the process's end. The exit of one that had ended before it was known may have gone to its parent, and
// then never comes.
func (p *process) await(exit <-chan reap.Exit) reap.Exit {
	if p.pidfd != nil {
		return <-exit
	}
	select {
	case e := <-exit:
		return e
	case <-time.After(lostTimeout):
		slog.Error("a process's status is lost", "process", p.pid)
		return reap.Exit{Status: lostStatus, Time: time.Now()}
	}
}

// ended lets go of everything but what is still to be sent of its output.
func (p *process) ended() {
	p.io.Ended()
	if p.pidfd != nil {
		_ = p.pidfd.Close()
	}
}

// streams makes a process's ends of its streams.
func (m *Manager) streams(s stdio.Streams, terminal bool) (*stdio.Process, error) {
	if terminal {
		return stdio.Terminal(s, m.rest), nil
	}
	io, err := stdio.Pipes(s, m.rest)
	if err != nil {
		return nil, fmt.Errorf("make pipes: %w", err)
	}
	return io, nil
}
