package enter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// changeRoot makes Root, read-only, or the trees, all of the file system that is left.
func changeRoot(s *Spec) error {
	// Nothing that is mounted here may show on the host.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	fill := bindRoot
	if len(s.Trees) > 0 {
		fill = plantTrees
	}
	if err := fill(s); err != nil {
		return err
	}
	if err := unix.Mount("", s.Root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", s.Root, err)
	}
	// With the same directory as new and old root the old one ends up mounted over the new one (pivot_root(2)).
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the host's root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return pruneTrees(s)
}

// bindRoot takes Root as it is, with a proc in which only the process itself is to be seen and a dev with next to nothing.
// Root needs the directories for these two.
func bindRoot(s *Spec) error {
	if err := unix.Mount(s.Root, s.Root, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", s.Root, err)
	}
	if err := unix.Chdir(s.Root); err != nil { // through the bind just made
		return err
	}
	if err := makeProc(filepath.Join(s.Root, "proc")); err != nil {
		return err
	}
	return makeDev(s, filepath.Join(s.Root, "dev"))
}

// makeProc makes a /proc with the process itself and with how the kernel commits memory, which QEMU wants to know before it
// maps memory of which not all is reserved. The kernel's own either hides that with all of /proc/sys, or shows all of it.
func makeProc(dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=4k,nr_inodes=8,mode=0755"); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	const commit = "sys/vm/overcommit_memory"
	mode, err := os.ReadFile("/proc/" + commit)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(commit)), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, commit), mode, 0o444); err != nil {
		return err
	}
	const real = "kernel"
	if err := os.Symlink(real+"/self", filepath.Join(dir, "self")); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, real), 0o555); err != nil {
		return err
	}
	if err := mountProc(filepath.Join(dir, real)); err != nil {
		return err
	}
	return readOnly(dir, unix.MS_NODEV)
}

// mountProc is there for /proc/self/fd, through which QEMU opens the files that it is handed, and cube-share those that
// it has found.
func mountProc(dir string) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	err := unix.Mount("proc", dir, "proc", flags, "hidepid=2,subset=pid")
	if errors.Is(err, unix.EINVAL) { // subset= is of Linux 5.8
		err = unix.Mount("proc", dir, "proc", flags, "hidepid=2")
	}
	if err != nil {
		return fmt.Errorf("mount proc on %s: %w", dir, err)
	}
	return nil
}

// makeDev makes a /dev with nothing but null, which QEMU probes for file locks with (without it, it would open disks
// without any), and kvm if that is wanted.
func makeDev(s *Spec, dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "size=4k,nr_inodes=4,mode=0755"); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	nodes := []string{"null"}
	if s.KVM {
		nodes = append(nodes, "kvm")
	}
	for _, name := range nodes {
		var host unix.Stat_t
		if err := unix.Stat("/dev/"+name, &host); err != nil {
			return fmt.Errorf("/dev/%s: %w", name, err)
		}
		node := filepath.Join(dir, name)
		if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(host.Rdev)); err != nil {
			return fmt.Errorf("make %s: %w", node, err)
		}
		if err := unix.Chown(node, int(s.UID), int(s.UID)); err != nil {
			return fmt.Errorf("make %s: %w", node, err)
		}
	}
	return readOnly(dir, 0)
}

// readOnly ends the writing to what is mounted at dir, from which nothing is executed either.
func readOnly(dir string, flags uintptr) error {
	err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NOEXEC|flags, "")
	if err != nil {
		return fmt.Errorf("make %s read-only: %w", dir, err)
	}
	return nil
}
