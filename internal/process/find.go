package process

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
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
