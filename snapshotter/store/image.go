package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

const (
	// minSize is the least size of a store that is of use.
	minSize = units.GiB
	// hostReserve is what a store that was asked for leaves to the rest of its file system.
	hostReserve = units.GiB
)

// imageSize is how large the store's image is made, given what is free. A size that was asked for is made or refused;
// the default shrinks.
func imageSize(cfg *config.Config, free int64) (int64, error) {
	size := int64(cfg.Store.Size)
	switch {
	case size < minSize:
		return 0, fmt.Errorf("store.size = %s must be at least %s, or 0 for a plain directory whose snapshots are full copies", cfg.Store.Size, units.BytesSize(minSize))
	case size+hostReserve <= free:
		return size, nil
	case cfg.Store.Size == config.Default().Store.Size && free/2 >= minSize:
		return free / 2, nil
	}
	return 0, fmt.Errorf("a store of %s doesn't fit into %s, where %s is free (%s of it stays with the host): make room, or set store.size to less",
		units.BytesSize(float64(size)), cfg.StateDir, units.BytesSize(float64(free)), units.BytesSize(hostReserve))
}

// makeImage makes the XFS image, complete or not at all.
func makeImage(ctx context.Context, cfg *config.Config, log *slog.Logger) (err error) {
	tmp := cfg.StoreImage() + ".tmp"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("make the store: %w", err)
	}
	_, free, err := space(cfg.StateDir)
	if err != nil {
		return err
	}
	size, err := imageSize(cfg, free)
	if err != nil {
		return err
	}
	if size != int64(cfg.Store.Size) {
		log.Warn("the store is smaller than by default, because there is little room; store.size sets it", "size", units.BytesSize(float64(size)), "free", units.BytesSize(float64(free)))
	}
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("make the store: %w", err)
	}
	defer f.Close()
	defer func() {
		if err != nil {
			err = fmt.Errorf("make the store of %s (store.size): %w", units.BytesSize(float64(size)), errors.Join(err, os.Remove(tmp)))
		}
	}()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		return fmt.Errorf("allocate %s: %w", tmp, err)
	}
	killpoint("allocated")
	// -K: no discard, which would give the allocated blocks back. Sectors of 4 KiB suit direct I/O on the loop device.
	if err := run(ctx, "mkfs.xfs", "-q", "-f", "-K", "-s", "size=4096", "-m", "reflink=1", "-L", "cube-store", tmp); err != nil {
		return err
	}
	killpoint("formatted")
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(tmp, cfg.StoreImage()); err != nil {
		return err
	}
	killpoint("renamed")
	return syncDir(filepath.Dir(tmp))
}

// allocate makes the image as large as store.size says, and fills the holes that an fstrim may have left. XFS doesn't
// shrink.
func allocate(cfg *config.Config, log *slog.Logger, img string) error {
	f, err := os.OpenFile(img, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("allocate the store: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("allocate the store: %w", err)
	}
	size := int64(cfg.Store.Size)
	switch {
	case cfg.Store.Size == config.Default().Store.Size:
		size = st.Size // it may have been made smaller for want of room
	case size < st.Size:
		log.Warn("store.size is less than the store has, which can't shrink; it stays as it is", "store.size", cfg.Store.Size.String(), "size", units.BytesSize(float64(st.Size)))
		size = st.Size
	}
	missing := size - st.Blocks*512 // st_blocks is in 512-byte units, see stat(2)
	if missing <= 0 {
		return nil
	}
	_, free, err := space(filepath.Dir(img))
	if err != nil {
		return err
	}
	if size > st.Size && missing+hostReserve > free {
		return fmt.Errorf("the store can't grow to store.size = %s: that takes %s more, and %s is free (%s of it stays with the host): make room, or set store.size to less",
			cfg.Store.Size, units.BytesSize(float64(missing)), units.BytesSize(float64(free)), units.BytesSize(hostReserve))
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		return fmt.Errorf("allocate the store's %s (store.size): %w", units.BytesSize(float64(size)), errors.Join(err, f.Truncate(st.Size)))
	}
	return f.Sync()
}

// growFS makes the mounted file system as large as its image. It does what a killed one left to do, too.
func growFS(ctx context.Context, dir, dev string, img string) error {
	fsSize, err := xfsSize(dir)
	if err != nil {
		return fmt.Errorf("grow the store: %w", err)
	}
	st, err := os.Stat(img)
	if err != nil {
		return fmt.Errorf("grow the store: %w", err)
	}
	if fsSize+minGrowth > st.Size() {
		return nil
	}
	f, err := openLoop(dev)
	if err != nil {
		return fmt.Errorf("grow the store: %w", err)
	}
	defer f.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), loopSetCapacity, 0); errno != 0 {
		return fmt.Errorf("grow the store: %s: %w", dev, errno)
	}
	if err := run(ctx, "xfs_growfs", "-d", dir); err != nil {
		return fmt.Errorf("grow the store: %w", err)
	}
	return nil
}

// minGrowth is the least that the image must be larger than its file system before that is grown, in bytes: mkfs.xfs
// may leave a rest that isn't worth an allocation group.
const minGrowth = 64 * units.MiB

// XFS_IOC_FSGEOMETRY_V1 and what it fills in, from xfs_fs.h.
const (
	xfsIocGeometry   = 0x80705864
	geometrySize     = 112
	geometryBlock    = 0  // uint32: block size in bytes
	geometryDataSize = 32 // uint64: number of data blocks
)

// xfsSize is the size of the XFS mounted on dir, its log included, in bytes.
func xfsSize(dir string) (int64, error) {
	d, err := os.Open(dir)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	var g [geometrySize]byte
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), xfsIocGeometry, uintptr(unsafe.Pointer(&g))); errno != 0 {
		return 0, fmt.Errorf("geometry of %s: %w", dir, errno)
	}
	ne := binary.NativeEndian
	return int64(ne.Uint32(g[geometryBlock:])) * int64(ne.Uint64(g[geometryDataSize:])), nil
}

// run runs one of xfsprogs' tools.
func run(ctx context.Context, name string, args ...string) error {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = &out
	err := cmd.Run()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%s is missing: install xfsprogs", name)
	case err != nil:
		return fmt.Errorf("%s: %w: %s", name, err, strings.Join(strings.Fields(out.String()), " "))
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// killpoint is where tests kill the process. It does nothing otherwise.
var killpoint = func(string) {}
