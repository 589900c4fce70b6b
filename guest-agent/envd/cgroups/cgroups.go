// Package cgroups divides a sandbox's control group: one for envd and the sandbox's init, which users' programs don't starve,
// one for commands, one for terminals.
package cgroups

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Root is where a sandbox finds its control group.
const Root = "/sys/fs/cgroup"

// Names of the groups below it.
const (
	Daemon   = "envd"
	Commands = "user"
	Terminal = "pty"
)

// groups are what is set up, with what differs from the kernel's defaults. The memory is what envd takes at most, with the
// kernel's own for its connections; processors are shared by weight, where the default is 100.
var groups = []struct {
	name  string
	files map[string]string
}{
	{Daemon, map[string]string{"memory.low": strconv.Itoa(64 << 20), "cpu.weight": "1000"}},
	{Commands, nil},
	{Terminal, map[string]string{"cpu.weight": "200"}},
}

// Divide makes the groups below root and moves this process into the daemon's. The error is errors.ErrUnsupported where root
// isn't a writable control group (v2). After others, the groups may be there, without all that they are for.
func Divide(root string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is no cgroup2: %w", root, errors.ErrUnsupported)
	}
	for _, g := range groups {
		err := os.Mkdir(filepath.Join(root, g.name), 0o755)
		if errors.Is(err, unix.EROFS) || errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("%s can't be written: %w", root, errors.ErrUnsupported)
		}
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if err := set(root, Daemon, "cgroup.procs", "0"); err != nil {
		return fmt.Errorf("move into cgroup %s: %w", Daemon, err)
	}
	// Only a group without processes hands controllers on.
	available, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return err
	}
	var errs []error
	for c := range strings.FieldsSeq(string(available)) {
		errs = append(errs, set(root, "", "cgroup.subtree_control", "+"+c))
	}
	for _, g := range groups {
		for name, value := range g.files {
			if err := set(root, g.name, name, value); !errors.Is(err, os.ErrNotExist) { // a controller that isn't there
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// set writes one of the kernel's files.
func set(root, group, name, value string) error {
	f, err := os.OpenFile(filepath.Join(root, group, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// Open opens a group, for a process to be started in.
func Open(root, name string) (*os.File, error) {
	return os.OpenFile(filepath.Join(root, name), os.O_RDONLY|unix.O_DIRECTORY, 0)
}
