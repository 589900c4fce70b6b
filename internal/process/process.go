// Package process names processes so that a recycled pid is never mistaken for the one that was meant: by pid and the
// time at which it was started.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ID is one process of this boot of the host. The zero value is no process.
type ID struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, field 22 of /proc/<pid>/stat
}

// Self is the calling process.
func Self() (ID, error) { return Of(os.Getpid()) }

// Of reads the identity of a process.
func Of(pid int) (ID, error) {
	id, _, err := stat(pid)
	return id, err
}

// stat returns the process's identity and its state (proc_pid_stat(5), fields 22 and 3).
func stat(pid int) (ID, byte, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ID{}, 0, err
	}
	// The second field is the command in parentheses and may itself hold spaces and parentheses.
	_, rest, ok := bytes.Cut(b[max(bytes.LastIndexByte(b, ')'), 0):], []byte(" "))
	fields := bytes.Fields(rest)
	if !ok || len(fields) < 20 {
		return ID{}, 0, fmt.Errorf("/proc/%d/stat has an unknown format", pid)
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return ID{}, 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return ID{PID: pid, Start: start}, fields[0][0], nil
}

// Alive tells whether the process still runs. A zombie doesn't: it holds nothing but its pid.
func (id ID) Alive() bool {
	if id.PID <= 0 {
		return false
	}
	now, state, err := stat(id.PID)
	return err == nil && now == id && state != 'Z' && state != 'X'
}

// Kill ends the process with SIGKILL and waits for its end. A process that is gone is no error. It doesn't reap.
func (id ID) Kill(ctx context.Context) error {
	if id.PID <= 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(id.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", id.PID, err)
	}
	defer unix.Close(fd)
	if !id.Alive() { // looked at after the open: the pidfd is of the process that was checked
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", id.PID, err)
	}
	return waitExit(ctx, fd, id.PID)
}

// waitExit waits until the pidfd says that the process has exited.
func waitExit(ctx context.Context, fd, pid int) error {
	for {
		left := time.Hour
		if d, ok := ctx.Deadline(); ok {
			left = max(time.Until(d), 0)
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for process %d: %w", pid, err)
		case n > 0:
			return nil
		case ctx.Err() != nil || left == 0:
			return fmt.Errorf("process %d has not ended: %w", pid, context.DeadlineExceeded)
		}
	}
}
