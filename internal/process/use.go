package process

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"
)

// tick is the unit of the times in /proc: USER_HZ is 100 on all of Linux's architectures that Go has.
const tick = 10 * time.Millisecond

// Use is what a process takes of the host.
type Use struct {
	Command  string        // at most 15 bytes
	CPU      time.Duration // of all its threads, since its start
	Resident uint64        // memory in bytes, what others have too included
}

// UseOf reads it; see proc_pid_stat(5), fields 2, 14, 15 and 24. The error is fs.ErrNotExist or ESRCH if there is no such process.
func UseOf(pid int) (u Use, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return u, err
	}
	from, to := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if from < 0 || to < from {
		return u, fmt.Errorf("/proc/%d/stat has an unknown format", pid)
	}
	u.Command = string(b[from+1 : to])
	fields := bytes.Fields(b[to+1:]) // from the third on
	var n [3]uint64
	for i, field := range []int{14, 15, 24} {
		if len(fields) <= field-3 {
			return u, fmt.Errorf("/proc/%d/stat has an unknown format", pid)
		}
		if n[i], err = strconv.ParseUint(string(fields[field-3]), 10, 64); err != nil {
			return u, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	u.CPU, u.Resident = time.Duration(n[0]+n[1])*tick, n[2]*uint64(os.Getpagesize())
	return u, nil
}
