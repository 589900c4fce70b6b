package modules

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/disks"
)

const (
	// Serial is the disk with the modules: what /lib/modules/<release> has.
	Serial = "modules"
	// modprobeTimeout bounds how long the kernel, and whoever made it ask, waits for the disk.
	modprobeTimeout = 10 * time.Second
	// lockFile keeps two requests from mounting the disk at the same time.
	lockFile = "/run/modprobe.lock"
)

// Modprobe does what the kernel asks of its modprobe ("modprobe -q -- name"). It returns the exit status. What can't be
// loaded goes to the kernel's log, unless there is no such module at all: the kernel also asks for what nobody has.
func Modprobe(args []string) int {
	ctx, cancel := context.WithTimeout(context.Background(), modprobeTimeout)
	defer cancel()
	var failed error
	for _, a := range args {
		if !strings.HasPrefix(a, "-") {
			failed = errors.Join(failed, modprobe(ctx, a))
		}
	}
	if failed == nil {
		return 0
	}
	if !errors.Is(failed, ErrUnknown) {
		_ = os.WriteFile("/dev/kmsg", fmt.Appendf(nil, "modprobe: %v", failed), 0)
	}
	return 1
}

// modprobe loads all modules that a name stands for. One of them is enough: the others may be for other CPUs.
func modprobe(ctx context.Context, request string) error {
	dir, err := mount(ctx)
	if err != nil {
		return err
	}
	x, err := readIndex(os.DirFS(dir))
	if err != nil {
		return err
	}
	names, err := x.resolve(request)
	if err != nil {
		return err
	}
	var errs []error
	seen := map[string]bool{}
	for _, name := range names {
		var failed error
		for _, file := range x.order(nil, name, seen) {
			failed = errors.Join(failed, load(filepath.Join(dir, file)))
		}
		if failed != nil {
			errs = append(errs, failed)
		}
	}
	if len(errs) == len(names) {
		return errors.Join(errs...)
	}
	return nil
}

// Load loads modules by name, with what they need.
func Load(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := modprobe(ctx, name); err != nil {
			return fmt.Errorf("load module %s: %w", name, err)
		}
	}
	return nil
}

// mount mounts the disk where it isn't yet, and returns its place.
func mount(ctx context.Context) (dir string, err error) {
	if dir, err = Dir(); err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(dir, "modules.dep")); err == nil {
		return dir, nil
	}
	lock, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lockFile, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "modules.dep")); err == nil {
		return dir, nil // while this one waited
	}
	node, err := disks.Find(ctx, Serial)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	const flags = unix.MS_RDONLY | unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC
	if err := unix.Mount(node, dir, "ext4", flags, ""); err != nil {
		return "", fmt.Errorf("mount the disk with the modules: %w", err)
	}
	return dir, nil
}

// Unmount unmounts the disk, if it is mounted.
func Unmount() error {
	dir, err := Dir()
	if err != nil {
		return err
	}
	if err := unix.Unmount(dir, 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount the disk with the modules: %w", err)
	}
	return nil
}

// Dir is where the running kernel's modules are.
func Dir() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", err
	}
	return "/lib/modules/" + unix.ByteSliceToString(u.Release[:]), nil
}
