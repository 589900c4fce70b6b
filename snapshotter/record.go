package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/guestmark"
)

// record is what the metadata says of a snapshot.
type record struct {
	id       string
	parentID string // "" without a parent
	info     snapshots.Info
	usage    snapshots.Usage // of a committed snapshot
}

// imageID is the id whose image the snapshot uses: a view of a parent uses the parent's, which nobody can change.
func (r record) imageID() string {
	if r.info.Kind == snapshots.KindView && r.parentID != "" {
		return r.parentID
	}
	return r.id
}

func (s *Snapshotter) lookup(ctx context.Context, key string) (r record, err error) {
	err = s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		r, err = getRecord(ctx, key)
		return err
	})
	return r, err
}

// getRecord reads a snapshot's record within a transaction.
func getRecord(ctx context.Context, key string) (r record, err error) {
	if r.id, r.info, r.usage, err = storage.GetInfo(ctx, key); err != nil {
		return r, fmt.Errorf("snapshot %q: %w", key, err)
	}
	if r.info.Parent != "" {
		if r.parentID, _, _, err = storage.GetInfo(ctx, r.info.Parent); err != nil {
			return r, fmt.Errorf("parent %q of snapshot %q: %w", r.info.Parent, key, err)
		}
	}
	return r, nil
}

func (s *Snapshotter) path(id string) string { return filepath.Join(s.images, id+imageExt) }

// open opens an image for reading.
func (s *Snapshotter) open(id string) (*os.File, error) {
	f, err := os.Open(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missing(s.path(id))
	}
	return f, err
}

// marked tells whether a guest may have written the image.
func (s *Snapshotter) marked(id string) (bool, error) {
	m, err := guestmark.IsSet(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, missing(s.path(id))
	}
	return m, err
}

func missing(path string) error {
	return errdefs.ErrNotFound.WithMessage("its image " + path + " is gone: remove the container or image, and pull the image again")
}

// fail ends an operation's error: what was done to which snapshot, and the way out of a full store.
func (s *Snapshotter) fail(what, key string, err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s snapshot %q: %w", what, key, err)
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	free := "no"
	var st unix.Statfs_t
	if unix.Statfs(s.images, &st) == nil {
		free = units.BytesSize(float64(st.Bavail) * float64(st.Bsize))
	}
	return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf(
		"%v: the store %s is full (%s free): remove containers and images that aren't needed, or give it more room (store.size)",
		err, s.cfg.StoreDir(), free))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
