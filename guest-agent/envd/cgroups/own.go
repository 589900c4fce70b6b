package cgroups

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Own is a control group that is made for one command, and has all that comes of it, whatever sessions and groups of processes that
// makes.
type Own struct {
	// Dir is the group, for a process to be started in.
	Dir *os.File
}

// NewOwn makes one below another, which stays open as long as it is used.
func NewOwn(parent *os.File) (*Own, error) {
	path, err := os.MkdirTemp(fmt.Sprintf("/proc/self/fd/%d", parent.Fd()), "command-")
	if err != nil {
		return nil, fmt.Errorf("make a control group: %w", err)
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	return &Own{Dir: dir}, nil
}

// Kill kills all that is in it.
func (o *Own) Kill() error { return set(o.Dir.Name(), "", "cgroup.kill", "1") }

// Remove removes it, when nothing is in it any more. What is there after that time keeps it.
func (o *Own) Remove(within time.Duration) error {
	err := o.empty(time.Now().Add(within))
	if err == nil {
		err = os.Remove(o.Dir.Name())
	}
	return errors.Join(err, o.Dir.Close())
}

// empty returns when nothing is in it.
func (o *Own) empty(until time.Time) error {
	name := filepath.Join(o.Dir.Name(), "cgroup.events")
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 256)
	for {
		n, err := f.ReadAt(buf, 0)
		if n == 0 && err != nil {
			return err
		}
		if strings.Contains(string(buf[:n]), "populated 0") {
			return nil
		}
		left := time.Until(until)
		if left <= 0 {
			return fmt.Errorf("processes are left in %s", o.Dir.Name())
		}
		// The kernel says that the file has changed since it was read.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
