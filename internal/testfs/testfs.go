// Package testfs gives tests file systems of their own. Tests that use it run in a private mount namespace (Main), so
// that however they end, killed or timed out, the kernel takes their mounts and loop devices away with them.
package testfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"unsafe"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// isolated is in the environment of a process that has a mount namespace of its own.
const isolated = "CUBE_TEST_ISOLATED"

// Main runs the tests in a private mount namespace, and then after, if it is given. To be called by TestMain.
func Main(m *testing.M, after ...func()) {
	os.Exit(run(m, after))
}

func run(m *testing.M, after []func()) int {
	if os.Getenv(isolated) != "" {
		code := m.Run()
		for _, f := range after {
			f()
		}
		return code
	}
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests mount file systems: run them as root")
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), isolated+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// XFS is an XFS with reflinks of size bytes, at least 300 MiB, in a sparse image.
func XFS(t testing.TB, size int64) string {
	return mkfs(t, "xfs", size, "mkfs.xfs", "-q", "-m", "reflink=1")
}

// Ext4 is an ext4 of size bytes in a sparse image.
func Ext4(t testing.TB, size int64) string {
	return mkfs(t, "ext4", size, "mkfs.ext4", "-q", "-F")
}

func mkfs(t testing.TB, fstype string, size int64, command ...string) string {
	t.Helper()
	dir := t.TempDir()
	img, mnt := filepath.Join(dir, "fs.img"), filepath.Join(dir, "mnt")
	if err := os.WriteFile(img, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(img, size); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(command[0], append(command[1:], img)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command[0], err, out)
	}
	Mount(t, mount.Mount{Type: fstype, Source: img, Options: []string{"loop"}}, mnt)
	return mnt
}

// Mount makes dir and mounts m there until the test ends.
func Mount(t testing.TB, m mount.Mount, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := m.Mount(dir); err != nil {
		t.Fatalf("mount %s: %v", m.Source, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
}

// Random writes n bytes that can't be compressed or shared, and syncs them.
func Random(t testing.TB, path string, n int64) {
	t.Helper()
	out, err := exec.Command("dd", "if=/dev/urandom", "of="+path, "bs=1M", "iflag=count_bytes", "conv=fsync", "count="+strconv.FormatInt(n, 10)).CombinedOutput()
	if err != nil {
		t.Fatalf("dd: %v: %s", err, out)
	}
}

// PowerCut makes the file system that XFS or Ext4 mounted on dir lose what isn't on disk yet, as a power failure does,
// and mounts it again.
func PowerCut(t testing.TB, dir string) {
	t.Helper()
	// XFS_IOC_GOINGDOWN and XFS_FSOP_GOING_FLAGS_NOLOGFLUSH, from xfs_fs.h; ext4 has the same.
	const goingDown, noLogFlush = 0x8004587d, 2
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	flags := uint32(noLogFlush)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), goingDown, uintptr(unsafe.Pointer(&flags)))
	f.Close()
	if errno != 0 {
		t.Fatalf("shut %s down: %v", dir, errno)
	}
	infos, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(dir))
	if err != nil || len(infos) != 1 {
		t.Fatalf("mounts of %s: %v, %v", dir, infos, err)
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatalf("unmount %s: %v", dir, err)
	}
	img := filepath.Join(filepath.Dir(dir), "fs.img")
	m := mount.Mount{Type: infos[0].FSType, Source: img, Options: []string{"loop"}}
	if err := m.Mount(dir); err != nil {
		t.Fatalf("mount %s again: %v", img, err)
	}
}

// Fill leaves no space in dir's file system, not even for a directory.
func Fill(t testing.TB, dir string) {
	t.Helper()
	var st unix.Statfs_t
	f, err := os.Create(filepath.Join(dir, "ballast"))
	if err == nil {
		defer f.Close()
		err = unix.Statfs(dir, &st)
	}
	if err != nil {
		t.Fatal(err)
	}
	size, step := int64(0), int64(st.Bavail)*st.Bsize
	for ; step >= st.Bsize; step /= 2 {
		for unix.Fallocate(int(f.Fd()), 0, size, step) == nil {
			size += step
		}
	}
	for err == nil {
		_, err = os.MkdirTemp(dir, "ballast")
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}
