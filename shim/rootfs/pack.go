package rootfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"
)

// pageSize bounds mount(2)'s options.
const pageSize = 4096

// pack makes an ext4 image of what the mounts show and returns it open for writing. Nothing is left of it but the open
// file: the image has no name, and the mounts exist only in a mount namespace that ends with the work. So a kill at any
// point leaves nothing behind.
func pack(ctx context.Context, src Source, mounts []*types.Mount) (_ *os.File, err error) {
	if err := os.MkdirAll(src.Scratch, 0o700); err != nil {
		return nil, fmt.Errorf("pack the root: %w", err)
	}
	fd, err := unix.Open(src.Scratch, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("pack the root: make an image in %s: %w", src.Scratch, err)
	}
	image := os.NewFile(uintptr(fd), filepath.Join(src.Scratch, "packed root"))
	defer func() {
		if err != nil {
			image.Close()
		}
	}()
	if err := image.Truncate(src.ImageSize); err != nil {
		return nil, fmt.Errorf("pack the root: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- inOwnNamespace(func() error { return fill(ctx, image, mounts, src.MountPoint) }) }()
	if err := <-done; err != nil {
		return nil, fmt.Errorf("pack the root: %w", err)
	}
	return image, nil
}

// inOwnNamespace calls f on a thread with a mount namespace and a working directory of its own, which end with the
// goroutine: the thread is never given back. The main thread would not end, so it isn't used.
func inOwnNamespace(f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		defer runtime.UnlockOSThread()
		done := make(chan error, 1)
		go func() { done <- inOwnNamespace(f) }()
		return <-done
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	return f()
}

// fill mounts and has mkfs copy what is there. It must run on the thread of inOwnNamespace: the child is started from
// it and so sees the mounts.
func fill(ctx context.Context, image *os.File, mounts []*types.Mount, at string) error {
	for _, m := range mounts {
		if err := mount(m, at); err != nil {
			return fmt.Errorf("%s: %w", describe(m), err)
		}
	}
	// -m 0: nothing is reserved for root, who is everyone in there. Inode tables are left to the guest's kernel.
	cmd := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", "-d", at, "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{image}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, exec.ErrNotFound):
		return unsupported("mkfs.ext4 is not installed (Debian's e2fsprogs); it is needed for rootfs directories")
	case ctx.Err() != nil:
		return ctx.Err()
	case strings.Contains(out.String(), "No space left on device"):
		return unsupported("no space is left in %s; free some, or move state_dir", filepath.Dir(image.Name()))
	case strings.Contains(out.String(), "Could not allocate block"):
		fi, statErr := image.Stat()
		if statErr != nil {
			return statErr
		}
		return unsupported("its content doesn't fit in %d MiB; raise store.disk_size", fi.Size()>>20)
	}
	return fmt.Errorf("mkfs.ext4: %w: %s", err, strings.Join(strings.Fields(out.String()), " "))
}

// mount makes a bind or overlay mount, read-only: it is only looked at.
func mount(m *types.Mount, at string) error {
	switch m.Type {
	case "bind":
		fi, err := os.Stat(m.Source)
		if err != nil {
			return err
		}
		if !fi.IsDir() {
			return unsupported("it is not a directory")
		}
		return unix.Mount(m.Source, at, "", unix.MS_BIND, "")
	case "overlay":
		data, err := overlayData(m.Options)
		if err != nil {
			return err
		}
		return unix.Mount("overlay", at, "overlay", unix.MS_RDONLY, data)
	}
	return unsupported("only bind and overlay mounts can be packed")
}

// overlayData is mount(2)'s data for an overlay that is only read: its upper directory is one more lower one. Where the
// names don't fit in a page it makes them relative to the directory that all of them are in, and goes there.
func overlayData(options []string) (string, error) {
	var dirs, rest []string
	for _, o := range options {
		key, value, _ := strings.Cut(o, "=")
		switch key {
		case "ro", "rw", "workdir":
		case "upperdir":
			dirs = append([]string{value}, dirs...)
		case "lowerdir":
			dirs = append(dirs, strings.Split(value, ":")...)
		default:
			rest = append(rest, o)
		}
	}
	if len(dirs) == 0 {
		return "", invalid("no lowerdir")
	}
	join := func() string {
		return strings.Join(append(rest, "lowerdir="+strings.Join(dirs, ":")), ",")
	}
	if data := join(); len(data) < pageSize {
		return data, nil
	}
	base := filepath.Dir(dirs[0])
	for _, d := range dirs {
		for base != "/" && !strings.HasPrefix(d, base+"/") {
			base = filepath.Dir(base)
		}
	}
	for i, d := range dirs {
		dirs[i] = strings.TrimPrefix(strings.TrimPrefix(d, base), "/")
	}
	data := join()
	if len(data) >= pageSize {
		return "", unsupported("it has too many layers: their names take more than %d bytes", pageSize)
	}
	return data, unix.Chdir(base)
}
