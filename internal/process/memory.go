package process

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Memory is what a process has of the host's memory, in bytes.
type Memory struct {
	// Private is what no other process has, Resident all of it, and PSS all of it with what is shared divided among those who
	// share it. Anonymous is what is of no file.
	Private, Resident, PSS, Anonymous uint64
}

// MemoryOf reads smaps_rollup; see proc_pid_smaps(5). The error is fs.ErrNotExist or ESRCH if there is no such process.
func MemoryOf(pid int) (m Memory, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		kib, ok := strings.CutSuffix(strings.TrimSpace(value), " kB")
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(strings.TrimSpace(kib), 10, 64)
		if err != nil {
			return m, fmt.Errorf("memory of process %d: %w", pid, err)
		}
		switch name {
		case "Private_Clean", "Private_Dirty":
			m.Private += n << 10
		case "Rss":
			m.Resident = n << 10
		case "Anonymous":
			m.Anonymous = n << 10
		case "Pss":
			m.PSS = n << 10
		}
	}
	return m, nil
}
