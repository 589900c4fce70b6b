package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// run executes a program with the disk as its root, and with all that a host with cgroup v2 has.
func run(dev string, argv []string) (string, error) {
	const root = "/tmp"
	for _, m := range [][3]string{
		{dev, root, "ext4"},
		{"proc", root + "/proc", "proc"},
		{"sysfs", root + "/sys", "sysfs"},
		{"devtmpfs", root + "/dev", "devtmpfs"},
		{"cgroup2", root + "/sys/fs/cgroup", "cgroup2"},
	} {
		if err := os.MkdirAll(m[1], 0o755); err != nil {
			return "", err
		}
		if err := unix.Mount(m[0], m[1], m[2], 0, ""); err != nil {
			return "", fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/bin:/usr/bin", "TMPDIR=/tmp"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, strconv.Quote(string(out)))
	}
	return strconv.Quote(string(out)), nil
}
