package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/snapshotter/image"
)

// Prepare makes an active snapshot: a clone of the parent's image, or an empty file system. SizeLabel says how large
// its disk is.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	m, err := s.create(ctx, snapshots.KindActive, key, parent, opts)
	return m, s.fail("prepare", key, err)
}

// View makes a read-only snapshot that uses the parent's image as it is. SizeLabel means nothing here.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	m, err := s.create(ctx, snapshots.KindView, key, parent, opts)
	return m, s.fail("view", key, err)
}

func (s *Snapshotter) create(ctx context.Context, kind snapshots.Kind, key, parent string, opts []snapshots.Opt) ([]mount.Mount, error) {
	var info snapshots.Info
	for _, opt := range opts {
		if err := opt(&info); err != nil {
			return nil, err
		}
	}
	p, err := s.lookupParent(ctx, key, parent)
	if err != nil {
		return nil, err
	}
	r := record{info: snapshots.Info{Kind: kind}, parentID: p.id}
	var file string // the image, if the snapshot has one of its own
	if r.imageID() == r.id {
		size := int64(s.cfg.Store.DiskSize)
		if kind == snapshots.KindActive {
			if err := s.room(ctx); err != nil {
				return nil, err
			}
			if size, err = s.diskSize(info.Labels, p); err != nil {
				return nil, err
			}
			opts = inheritSize(opts, info.Labels, p.labels)
		}
		if file, err = s.makeImage(ctx, p, size); err != nil {
			return nil, err
		}
	}
	if r.id, err = s.register(ctx, kind, key, parent, p.id, file, opts); err != nil {
		if file != "" {
			if rmErr := os.Remove(file); !errors.Is(rmErr, fs.ErrNotExist) {
				err = errors.Join(err, rmErr)
			}
			s.collector.kick() // the file may have got its final name already
		}
		return nil, err
	}
	killpoint("registered")
	return s.mounts(r.imageID(), kind == snapshots.KindView)
}

// parentImage is a parent to clone, or nothing at all.
type parentImage struct {
	id     string // "" = there is no parent
	size   int64  // the disk's, in bytes
	labels map[string]string
}

// lookupParent finds the parent and refuses keys that exist, before any work is done; register decides.
func (s *Snapshotter) lookupParent(ctx context.Context, key, parent string) (p parentImage, err error) {
	var r record
	err = s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		if _, _, _, err := storage.GetInfo(ctx, key); err == nil {
			return errdefs.ErrAlreadyExists
		}
		if parent != "" {
			r, err = getRecord(ctx, parent)
		}
		return err
	})
	if err != nil || parent == "" {
		return p, err
	}
	if r.info.Kind != snapshots.KindCommitted {
		return p, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("parent %q is not committed", parent))
	}
	// A commit refuses marked images and waits for writers, so this is somebody who opened the image before and wrote
	// it after.
	marked, err := s.marked(r.id)
	if err != nil {
		return p, fmt.Errorf("parent %q: %w", parent, err)
	}
	if marked {
		return p, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("parent %q was written by a guest after it was committed: remove the image and pull it again", parent))
	}
	st, err := os.Stat(s.path(r.id))
	if err != nil {
		return p, err
	}
	return parentImage{id: r.id, size: st.Size(), labels: r.info.Labels}, nil
}

// makeImage makes the image under a temporary name, complete and synced.
func (s *Snapshotter) makeImage(ctx context.Context, p parentImage, size int64) (_ string, err error) {
	f, err := os.CreateTemp(s.tmp, "new-*")
	if err != nil {
		return "", err
	}
	defer f.Close()
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	killpoint("created")
	if p.id == "" {
		err = image.Format(ctx, f.Name(), size)
	} else {
		err = s.clone(ctx, f, p, size)
	}
	if err != nil {
		return "", err
	}
	killpoint("filled")
	return f.Name(), f.Sync()
}

func (s *Snapshotter) clone(ctx context.Context, f *os.File, p parentImage, size int64) error {
	src, err := s.open(p.id)
	if err != nil {
		return err
	}
	defer src.Close()
	shared, err := image.Clone(ctx, f, src)
	if err != nil {
		return err
	}
	if !shared {
		s.copies.Do(func() {
			s.log.Warn("files of the store can't share blocks, so every snapshot is a full copy: use XFS or btrfs for state_dir, or a store.size above 0", "store", s.cfg.StoreDir())
		})
	}
	if size > p.size {
		return f.Truncate(size) // the guest grows the file system when it mounts it
	}
	return nil
}

// register makes the snapshot known, and its file final. On failure the file is there under one of the two names.
func (s *Snapshotter) register(ctx context.Context, kind snapshots.Kind, key, parent, parentID, file string, opts []snapshots.Opt) (id string, err error) {
	err = s.meta.WithTransaction(ctx, true, func(ctx context.Context) error {
		snap, err := storage.CreateSnapshot(ctx, kind, key, parent, opts...)
		if err != nil {
			return err
		}
		id = snap.ID
		if parent != "" && snap.ParentIDs[0] != parentID {
			return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("parent %q was replaced meanwhile; try again", parent))
		}
		if file == "" {
			return nil
		}
		// Ids of failed transactions come again; the rename then replaces the file that one of them left.
		if err := os.Rename(file, s.path(id)); err != nil {
			return err
		}
		killpoint("renamed")
		return syncDir(s.images)
	})
	return id, err
}
