// Package space is how full the store is, and whether anything may still be made in it.
package space

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// Room is what a file system has, in bytes.
type Room struct {
	Size int64 `json:"size"`
	Free int64 `json:"free"` // for others than root
}

// Of is the room of the file system that path is on.
func Of(path string) (Room, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Room{}, fmt.Errorf("free space of %s: %w", path, err)
	}
	return Room{Size: int64(st.Blocks) * st.Bsize, Free: int64(st.Bavail) * st.Bsize}, nil
}

// Settle has the file system that dir is on count what was removed as free. XFS removes files that are unlinked in the
// background otherwise. Others count at once.
func Settle(dir string) {
	d, err := os.Open(dir)
	if err != nil {
		return
	}
	defer d.Close()
	// It also takes from files what they have beyond their ends, for writes to come.
	b := eofBlocks{version: 1}
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, d.Fd(), xfsIocFreeEOFBlocks, uintptr(unsafe.Pointer(&b)))
}

// From xfs_fs.h.
const xfsIocFreeEOFBlocks = 0x8080583a

type eofBlocks struct {
	version, flags, uid, gid, project, _ uint32
	minFileSize                          uint64
	_                                    [12]uint64
}

// Above tells whether more than that share of it is in use.
func (r Room) Above(percent int) bool { return r.Size-r.Free > r.Size/100*int64(percent) }

// Check returns errdefs.ErrResourceExhausted, which says what to do, when the store is above its high watermark. One that isn't
// there yet has room.
func Check(cfg *config.Config) error {
	r, err := Of(cfg.StoreDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !r.Above(cfg.Store.HighWatermark) {
		return err
	}
	return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf(
		"the store %s has %s free of %s, less than is kept for what runs (store.high_watermark = %d): `cube df` tells what takes it, `cube prune` frees what nobody needs",
		cfg.StoreDir(), units.BytesSize(float64(r.Free)), units.BytesSize(float64(r.Size)), cfg.Store.HighWatermark))
}
