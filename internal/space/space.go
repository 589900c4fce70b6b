// Package space is how full the store is, and whether anything may still be made in it.
package space

import (
	"errors"
	"fmt"
	"io/fs"

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
