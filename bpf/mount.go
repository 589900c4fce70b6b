package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// layout is the version of everything in dp/abi.h and dp/maps.h. Another one has its maps in another directory, empty.
const layout = "v1"

// Where things are pinned. Hooks are no part of the layout: another one's programs take them over.
func mapsDir(dir string) string    { return filepath.Join(dir, "maps-"+layout) }
func linksDir(dir string) string   { return filepath.Join(dir, "links") }
func filtersDir(dir string) string { return filepath.Join(dir, "filters") }

// pinned is where a map is, or a program beside the maps that it uses.
func pinned(dir, name string) string { return filepath.Join(mapsDir(dir), name) }

// mount mounts the BPF file system at dir, unless it is there already.
func mount(dir string) (undo func() error, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the datapath's directory: %w", err)
	}
	mounted, err := mounted(dir)
	if err != nil {
		return nil, err
	}
	undo = func() error { return nil }
	if !mounted {
		if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
			return nil, errors.Join(fmt.Errorf("mount the BPF file system at %s: %w", dir, err), os.Remove(dir))
		}
		undo = func() error { return unmount(dir) }
	}
	for _, d := range []string{mapsDir(dir), linksDir(dir), filtersDir(dir)} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errors.Join(fmt.Errorf("make a directory for pins: %w", err), undo())
		}
	}
	return undo, nil
}

func unmount(dir string) error {
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the BPF file system at %s: %w", dir, err)
	}
	return os.Remove(dir)
}

// mounted tells whether a BPF file system is mounted at dir itself, of which there must be no other mount.
func mounted(dir string) (bool, error) {
	is, err := mountinfo.Mounted(dir)
	if err != nil || !is {
		return false, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false, fmt.Errorf("ask for the file system at %s: %w", dir, err)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return false, fmt.Errorf("%s is a mount of another file system; unmount it or choose another directory", dir)
	}
	return true, nil
}
