package stack

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// End sends a process a signal and returns when it has ended, with all its threads: until then it has its sockets and
// locks, also when /proc calls it a zombie. One that has ended by itself is none of its concern.
func (s *Stack) End(t testing.TB, pid int, signal unix.Signal) {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("there is no process to send %v to", signal)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatalf("open process %d: %v", pid, err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		t.Fatalf("%v to process %d: %v", signal, pid, err)
	}
	if !ended(fd, s.Config.Timeout(time.Minute)) {
		t.Fatalf("process %d doesn't end after %v", pid, signal)
	}
}

// Runs says whether a process, or a thread of it, runs.
func Runs(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return !ended(fd, 0)
}

// ended waits for the end of a process.
func ended(fd int, within time.Duration) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(within.Milliseconds()))
		if !errors.Is(err, unix.EINTR) { // the runtime's own signals
			return n == 1
		}
	}
}
