// Package rootfs makes a container's root file system of disks: one disk, or an overlay of several. What is on a disk is
// the image's author's and the workload's; no link in it leads out of it.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/disks"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
)

// ErrInvalid says that the description of a root makes no sense.
var ErrInvalid = errors.New("invalid root file system")

// maxDisks is far more than a machine can have plugged in.
const maxDisks = 256

// Root is a mounted root file system.
type Root struct {
	// Path is where it is.
	Path string
	// mounted is what Unmount unmounts, last first.
	mounted []string
}

// Mount finds the disks and mounts them below dir, which must exist. On failure nothing stays mounted.
func Mount(ctx context.Context, dir string, r *api.Rootfs) (_ *Root, err error) {
	if err := check(r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	root := &Root{}
	var u undo.Stack
	u.Push(root.Unmount)
	defer u.Run(&err)
	for i, d := range r.Disks {
		node, err := disks.Find(ctx, d.Serial)
		if err != nil {
			return nil, err
		}
		if err := disks.Resize(node, d.Bytes); err != nil {
			return nil, fmt.Errorf("disk %q: %w", d.Serial, err)
		}
		at := filepath.Join(dir, "disk"+strconv.Itoa(i))
		if err := disks.Mount(node, at, d.Fstype, d.Options); err != nil {
			return nil, fmt.Errorf("disk %q: %w", d.Serial, err)
		}
		root.mounted = append(root.mounted, at)
	}
	if r.Overlay == nil {
		root.Path = root.mounted[0]
		return root, nil
	}
	root.Path = filepath.Join(dir, "rootfs")
	if err := mountOverlay(root.Path, root.mounted, r.Overlay); err != nil {
		return nil, fmt.Errorf("mount overlay: %w", err)
	}
	root.mounted = append(root.mounted, root.Path)
	return root, nil
}

// Takes tells whether something can be mounted over that file, which is there or can be made.
func (r *Root) Takes(file string) bool {
	root, err := openBeneath(unix.AT_FDCWD, r.Path, 0)
	if err != nil {
		return false
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, file, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err == nil {
		_ = unix.Close(fd)
		return true
	}
	var fs unix.Statfs_t
	return unix.Fstatfs(root, &fs) == nil && fs.Flags&unix.ST_RDONLY == 0
}

// Unmount unmounts everything, which writes all data to the disks. When it fails, it may be called again.
func (r *Root) Unmount() error {
	for n := len(r.mounted); n > 0; n-- {
		if err := disks.Unmount(r.mounted[n-1]); err != nil {
			return err
		}
		r.mounted = r.mounted[:n-1]
	}
	return nil
}

func check(r *api.Rootfs) error {
	for _, d := range r.GetDisks() {
		if err := disks.Check(d.GetSerial(), d.GetFstype()); err != nil {
			return err
		}
	}
	switch o := r.GetOverlay(); {
	case len(r.GetDisks()) == 0:
		return errors.New("no disk")
	case len(r.Disks) > maxDisks:
		return fmt.Errorf("%d disks", len(r.Disks))
	case o == nil && len(r.Disks) > 1:
		return errors.New("several disks and no overlay")
	case o == nil:
		return nil
	case len(o.Lower) == 0:
		return errors.New("overlay without a lower directory")
	case (o.Upper == nil) != (o.Work == nil):
		return errors.New("overlay with only one of upper and work directory")
	}
	return nil
}

// mountOverlay mounts an overlay of directories on the mounted disks at dir, which it makes. It names the directories
// by open file descriptors: nothing in a path is then taken for a separator, and no link in it followed.
func mountOverlay(dir string, mounted []string, o *api.Overlay) (err error) {
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	open := func(l *api.LayerDir, create bool) (string, error) {
		if int(l.GetDisk()) >= len(mounted) {
			return "", fmt.Errorf("%w: no disk %d", ErrInvalid, l.GetDisk())
		}
		fd, err := openDir(mounted[l.GetDisk()], l.GetPath(), create)
		if err != nil {
			return "", fmt.Errorf("directory %q on disk %d: %w", l.GetPath(), l.GetDisk(), err)
		}
		fds = append(fds, fd)
		return "/proc/self/fd/" + strconv.Itoa(fd), nil
	}
	var lower []string
	for _, l := range o.Lower {
		d, err := open(l, false)
		if err != nil {
			return err
		}
		lower = append(lower, d)
	}
	opts := []string{"lowerdir=" + strings.Join(lower, ":")}
	flags := uintptr(unix.MS_RDONLY)
	if o.Upper != nil {
		flags = 0
		upper, err := open(o.Upper, true)
		if err != nil {
			return err
		}
		work, err := open(o.Work, true)
		if err != nil {
			return err
		}
		opts = append(opts, "upperdir="+upper, "workdir="+work)
	}
	data := strings.Join(append(opts, o.Options...), ",")
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("%w: %d lower directories are too many", ErrInvalid, len(o.Lower))
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("overlay", dir, "overlay", flags, data); err != nil {
		_ = os.Remove(dir)
		return err
	}
	return nil
}

// openDir opens a directory below root. create makes the last element of path if need be.
func openDir(root, path string, create bool) (int, error) {
	fd, err := openBeneath(unix.AT_FDCWD, root, 0)
	if err != nil || path == "" {
		return fd, err
	}
	defer unix.Close(fd)
	const inside = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV
	path = strings.Trim(path, "/")
	if create {
		parent, err := openBeneath(fd, filepath.Dir(path), inside)
		if err != nil {
			return -1, err
		}
		defer unix.Close(parent)
		if err := unix.Mkdirat(parent, filepath.Base(path), 0o755); err != nil && err != unix.EEXIST {
			return -1, err
		}
	}
	return openBeneath(fd, path, inside)
}

func openBeneath(at int, path string, resolve uint64) (int, error) {
	return unix.Openat2(at, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: resolve})
}
