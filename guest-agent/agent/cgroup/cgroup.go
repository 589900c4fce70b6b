// Package cgroup looks after a container's cgroup, which its runtime makes and removes.
package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Group is a cgroup of the unified hierarchy.
type Group struct {
	mountpoint string
	path       string // as in /proc/<pid>/cgroup
}

// New names a cgroup; it need not exist.
func New(mountpoint, path string) Group { return Group{mountpoint: mountpoint, path: path} }

func (g Group) dir() string { return filepath.Join(g.mountpoint, g.path) }

// Delegate makes the cgroup, if need be, and lets its children have all controllers that it has itself.
func (g Group) Delegate() error {
	if err := os.Mkdir(g.dir(), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make cgroup %s: %w", g.path, err)
	}
	b, err := os.ReadFile(filepath.Join(g.dir(), "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read the controllers of cgroup %s: %w", g.path, err)
	}
	enable := ""
	for _, c := range strings.Fields(string(b)) {
		enable += " +" + c
	}
	if err := os.WriteFile(filepath.Join(g.dir(), "cgroup.subtree_control"), []byte(enable), 0); err != nil {
		return fmt.Errorf("enable the controllers of cgroup %s: %w", g.path, err)
	}
	return nil
}

// Processes lists the pids in the cgroup and below it.
func (g Group) Processes() ([]int, error) {
	var pids []int
	err := filepath.WalkDir(g.dir(), func(dir string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return gone(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			return gone(err)
		}
		for _, field := range strings.Fields(string(b)) {
			// 0 stands for a process outside of this pid namespace.
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	return pids, nil
}

// gone takes it for no error that a cgroup has just been removed, or is threaded and so lists no processes of its own.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// Kill kills all processes in the cgroup and below it. It doesn't wait for their end.
func (g Group) Kill() error {
	if err := os.WriteFile(filepath.Join(g.dir(), "cgroup.kill"), []byte("1"), 0); err != nil && gone(err) != nil {
		return fmt.Errorf("kill all processes: %w", err)
	}
	return nil
}

// Signal sends a signal to all processes in the cgroup and below it.
func (g Group) Signal(sig unix.Signal) error {
	if sig == unix.SIGKILL {
		return g.Kill()
	}
	pids, err := g.Processes()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, sig); err != nil && err != unix.ESRCH {
			return fmt.Errorf("signal process %d: %w", pid, err)
		}
	}
	return nil
}

// WaitEmpty returns when no process is left in the cgroup and below it.
func (g Group) WaitEmpty(ctx context.Context) error {
	return g.watch(ctx, "cgroup.events", func() (bool, error) {
		n, err := g.value("cgroup.events", "populated")
		return n == 0, err
	})
}

// OOMKills is how many processes of the cgroup, and of those below it, the kernel has killed for want of memory.
func (g Group) OOMKills() (uint64, error) { return g.value("memory.events", "oom_kill") }

// WatchOOM calls changed whenever something may have been killed for want of memory, until ctx ends or the cgroup is
// removed.
func (g Group) WatchOOM(ctx context.Context, changed func()) error {
	return g.watch(ctx, "memory.events", func() (bool, error) {
		if _, err := os.Stat(g.dir()); err != nil {
			return true, gone(err)
		}
		changed()
		return false, nil
	})
}

// Stats returns io.containerd.cgroups.v2.Metrics, encoded.
func (g Group) Stats() ([]byte, error) {
	m, err := cgroup2.Load(g.path, cgroup2.WithMountpoint(g.mountpoint))
	if err != nil {
		return nil, fmt.Errorf("read statistics: %w", err)
	}
	metrics, err := m.Stat()
	if err != nil {
		return nil, fmt.Errorf("read statistics: %w", err)
	}
	return proto.Marshal(metrics)
}

// value reads one value of a file with "key value" lines, 0 when the cgroup isn't there.
func (g Group) value(file, key string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join(g.dir(), file))
	if err != nil {
		return 0, gone(err)
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		if k, v, _ := strings.Cut(s.Text(), " "); k == key {
			return strconv.ParseUint(v, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %q", file, key)
}
