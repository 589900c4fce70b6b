package process

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Found is a process with its command line.
type Found struct {
	ID
	Argv []string
}

// Find lists the processes whose command lines match. Both are of the same process, however fast pids are used again.
func Find(match func(argv []string) bool) ([]Found, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []Found
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !match(commandLine(pid)) {
			continue
		}
		id, err := Of(pid)
		if err != nil {
			continue // it has ended
		}
		argv := commandLine(pid)
		if match(argv) && id.Alive() {
			found = append(found, Found{ID: id, Argv: argv})
		}
	}
	return found, nil
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

// Started is when the process was started, to a hundredth of a second; the zero time when that can't be told.
func (id ID) Started() time.Time {
	var up unix.Timespec
	if id.PID <= 0 || unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) != nil {
		return time.Time{}
	}
	const tick = time.Second / 100 // USER_HZ on amd64
	return time.Now().Add(time.Duration(id.Start)*tick - time.Duration(up.Nano()))
}
