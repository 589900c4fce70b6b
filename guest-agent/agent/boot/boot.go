// Package boot makes of the initramfs that the kernel has just started a system that containers can run in.
package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/cgroup"
	"github.com/cubesandbox/cube/guest-agent/agent/modules"
)

// Modules is the list of the modules that are loaded at boot.
const Modules = "/etc/cube/boot-modules"

// Cgroups is where the one cgroup hierarchy is mounted.
const Cgroups = "/sys/fs/cgroup"

// Run does everything that takes neither the host nor a device. Only for PID 1, once. What fails and can be lived
// without is returned as well, after the rest has been done; fatal tells which it was.
func Run() (fatal error, failed error) {
	unix.Umask(0o022)
	if err := makeRootPivotable(); err != nil {
		return fmt.Errorf("prepare the root: %w", err), nil
	}
	for _, m := range mounts {
		if err := m.mount(); err != nil {
			return err, nil
		}
	}
	if err := cgroup.New(Cgroups, "/").Delegate(); err != nil {
		return err, nil
	}
	for _, step := range []func() error{
		func() error { return modules.LoadList(Modules) },
		applySysctls,
		func() error { return linkUp("lo") },
	} {
		failed = errors.Join(failed, step())
	}
	return nil, failed
}

// makeRootPivotable puts a bind mount of the initramfs over itself and moves into it. The kernel's own root can't be
// pivoted away from (pivot_root(2)), and containers shall leave the agent's file system by pivot_root: after a mere
// chroot it would still be below their root.
func makeRootPivotable() error {
	const at = "/run"
	if err := unix.Mount("/", at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind mount: %w", err)
	}
	if err := unix.Chdir(at); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move mount: %w", err)
	}
	// The kernel's threads share the file system context of PID 1, so its modprobe finds the same root.
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return unix.Chdir("/")
}

type mountPoint struct {
	fstype, dir string
	flags       uintptr
	data        string
}

const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

var mounts = []mountPoint{
	{"proc", "/proc", safe, ""},
	{"sysfs", "/sys", safe, ""},
	{"devtmpfs", "/dev", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=755"},
	{"devpts", "/dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"},
	{"mqueue", "/dev/mqueue", safe, ""},
	{"tmpfs", "/dev/shm", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"tmpfs", "/run", unix.MS_NOSUID | unix.MS_NODEV, "mode=755,size=25%"},
	{"tmpfs", "/tmp", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777,size=25%"},
	{"cgroup2", Cgroups, safe, "nsdelegate,memory_recursiveprot"},
}

func (m mountPoint) mount() error {
	if err := os.MkdirAll(m.dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.fstype, m.dir, m.fstype, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.fstype, m.dir, err)
	}
	return nil
}

// sysctls differ from the kernel's defaults.
var sysctls = map[string]string{
	// A pid isn't used again soon (the largest value, PID_MAX_LIMIT).
	"kernel/pid_max": "4194304",
	// What programs written for large hosts expect.
	"fs/inotify/max_user_instances": "8192",
	"fs/inotify/max_user_watches":   "524288",
	"vm/max_map_count":              "262144",
	// There is no IPv6 on the network; programs would try it first.
	"net/ipv6/conf/eth0/disable_ipv6": "1",
}

func applySysctls() error {
	var errs []error
	for name, value := range sysctls {
		if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0); err != nil {
			errs = append(errs, fmt.Errorf("sysctl %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// linkUp brings a network interface up.
func linkUp(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, r); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	r.SetUint16(r.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}
