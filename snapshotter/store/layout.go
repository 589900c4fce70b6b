package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/reflink"
)

// Kind is how the store exists.
type Kind string

const (
	// Directory is a plain directory of the state directory's file system.
	Directory Kind = "directory"
	// Mount is a file system that the operator mounted on the store's directory.
	Mount Kind = "mount"
	// Image is an XFS image mounted through a loop device.
	Image Kind = "image"
)

// layout is what the store is or will be.
type layout struct {
	kind    Kind
	dir     string
	image   string // of kind Image
	exists  bool   // the image file is there
	mounted bool   // the image is mounted on dir
	reflink bool
}

// inspect decides what the store is, without making anything.
func inspect(cfg *config.Config) (l layout, err error) {
	l = layout{kind: Directory, dir: cfg.StoreDir()}
	st, err := os.Stat(cfg.StoreImage())
	switch {
	case err == nil && !st.Mode().IsRegular():
		return l, fmt.Errorf("%s is not a file: move it away", cfg.StoreImage())
	case err == nil:
		l.exists = true
	case !errors.Is(err, fs.ErrNotExist):
		return l, fmt.Errorf("inspect the store: %w", err)
	}
	m, err := mountedOn(l.dir)
	if err != nil {
		return l, fmt.Errorf("inspect the store: %w", err)
	}
	if m != nil {
		return l.withMount(m, cfg)
	}
	if !l.exists {
		if l.reflink, err = reflink.Possible(nearest(l.dir)); err != nil {
			return l, fmt.Errorf("inspect the store: %w", err)
		}
		if l.reflink || cfg.Store.Size == 0 {
			return l, nil
		}
		if entries, err := os.ReadDir(l.dir); err == nil && len(entries) > 0 {
			return l, fmt.Errorf("%s has files on a file system without reflinks, which a store of its own would hide: set store.size = 0 to go on using it, or move it away", l.dir)
		}
	}
	l.kind, l.image, l.reflink = Image, cfg.StoreImage(), true
	return l, nil
}

// withMount completes the layout for a directory that is a mount point.
func (l layout) withMount(m *mountinfo.Info, cfg *config.Config) (layout, error) {
	img := cfg.StoreImage()
	if dev, err := openLoop(m.Source); err == nil {
		defer dev.Close()
		if l.exists && backedBy(dev, img) {
			l.kind, l.image, l.mounted, l.reflink = Image, img, true, true
			return l, nil
		}
		if gone, _ := backingGone(m.Source); gone {
			return l, fmt.Errorf("%s is mounted from an image that was deleted: stop what uses it and run umount %s", l.dir, l.dir)
		}
	}
	if l.exists {
		return l, fmt.Errorf("%s is mounted from %s although there is a store in %s: unmount the one or move the other away", l.dir, m.Source, img)
	}
	var err error
	if l.reflink, err = reflink.Possible(l.dir); err != nil {
		return l, fmt.Errorf("inspect the store: %w", err)
	}
	if !l.reflink && cfg.Store.Size > 0 {
		return l, fmt.Errorf("%s is mounted from %s (%s), where files can't share blocks: mount XFS or btrfs there, or unmount it so that cube makes its own store", l.dir, m.Source, m.FSType)
	}
	l.kind = Mount
	return l, nil
}

// mountedOn is the topmost mount on dir, or nil.
func mountedOn(dir string) (*mountinfo.Info, error) {
	real, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != real, false })
	if err != nil || len(all) == 0 {
		return nil, err
	}
	return all[len(all)-1], nil
}

// nearest is the deepest directory on the way to path that exists.
func nearest(path string) string {
	for {
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			return path
		}
		parent := filepath.Dir(path)
		if parent == path {
			return path
		}
		path = parent
	}
}

// Status is what `cube doctor` tells of the store.
type Status struct {
	Kind    Kind
	Dir     string
	Image   string // the XFS image, of kind Image
	Ready   bool   // false: Ensure has yet to make or mount it
	Reflink bool
	// Size and Free are the store's in bytes, or those of the file system that it will be made on.
	Size, Free int64
}

// Inspect tells what the store is, or what Ensure would make. An error says what keeps Ensure from it.
func Inspect(cfg *config.Config) (Status, error) {
	l, err := inspect(cfg)
	if err != nil {
		return Status{}, err
	}
	s := Status{Kind: l.kind, Dir: l.dir, Image: l.image, Reflink: l.reflink}
	at := nearest(l.dir)
	s.Ready = at == l.dir && (l.kind != Image || l.mounted)
	if s.Size, s.Free, err = space(at); err != nil {
		return Status{}, err
	}
	if l.kind == Image && !l.mounted {
		if _, err := deviceOf(l); err != nil {
			return Status{}, err
		}
		if !l.exists {
			_, err = imageSize(cfg, s.Free)
		}
	}
	return s, err
}

// space is the size of dir's file system and what is free for others than root, in bytes.
func space(dir string) (size, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil
}
