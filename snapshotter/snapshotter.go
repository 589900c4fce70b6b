// Package snapshotter is containerd's snapshotter `cube`: every snapshot is a raw ext4 image, and a child starts as a
// copy-on-write clone of its parent. containerd mounts images on the host to unpack layers; a container's image goes to
// its virtual machine as a disk. Once a guest may have written an image, the host never mounts it again.
//
// Metadata is in containerd's MetaStore, images are in files named after the MetaStore's ids. An image is complete and
// on disk before the transaction that makes it known commits, and is deleted after the one that forgets it, so that
// being killed anywhere leaves at most files that nobody knows, which the next start removes.
package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/snapshotter/image"
)

// Name is the snapshotter's name in containerd's configuration.
const Name = "cube"

const (
	// lockWait is how long another snapshotter on the same directory may take to let go of it.
	lockWait = 2 * time.Second
	// settleWait is how long a commit waits for the image's last writer to close it.
	settleWait = 10 * time.Second
)

// killpoint is where tests kill the process. It does nothing otherwise.
var killpoint = func(string) {}

// Snapshotter implements containerd's snapshots.Snapshotter and snapshots.Cleaner.
type Snapshotter struct {
	cfg       *config.Config
	log       *slog.Logger
	images    string // directory of the snapshots' images
	tmp       string // directory of images that are being made or deleted
	meta      *storage.MetaStore
	copies    sync.Once // the warning that images are copied
	collector *collector
	room      func(context.Context) error // whether a disk may be made
}

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// New opens the snapshotter of cfg.SnapshotterDir(), alone, and removes what a killed one left there. The caller closes
// it.
func New(cfg *config.Config, log *slog.Logger) (_ *Snapshotter, err error) {
	root := cfg.SnapshotterDir()
	s := &Snapshotter{
		cfg: cfg, log: log,
		images: filepath.Join(root, "images"),
		tmp:    filepath.Join(root, "tmp"),
	}
	for _, dir := range []string{root, s.images, s.tmp} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("open snapshotter: %w", err)
		}
	}
	if _, err := guestmark.IsSet(s.images); err != nil {
		return nil, fmt.Errorf("open snapshotter: %w: state_dir must be on a file system with trusted extended attributes (ext4, XFS, btrfs)", err)
	}
	s.meta, err = storage.NewMetaStore(filepath.Join(root, "metadata.db"), func(o *bbolt.Options) error {
		o.Timeout = cfg.Timeout(lockWait)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open snapshotter: %w", err)
	}
	if err := s.sweep(context.Background()); err != nil {
		err = errors.Join(err, s.meta.Close())
		if errors.Is(err, bolterrors.ErrTimeout) {
			err = fmt.Errorf("another process uses %s: stop it first (cube down), or set another state_dir", root)
		}
		return nil, fmt.Errorf("open snapshotter: %w", err)
	}
	s.room = func(context.Context) error { return space.Check(cfg) }
	s.collector = startCollector(s.collect, log)
	return s, nil
}

// Close ends the deletion of images under way and releases the directory. It may be called twice.
func (s *Snapshotter) Close() error {
	s.collector.stop()
	return s.meta.Close()
}

// Stat returns a snapshot's record.
func (s *Snapshotter) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	err = s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		if _, info, _, err = storage.GetInfo(ctx, key); err != nil {
			return fmt.Errorf("snapshot %q: %w", key, err)
		}
		return nil
	})
	return info, err
}

// Update changes a snapshot's labels. Changing SizeLabel has no effect on a disk that exists.
func (s *Snapshotter) Update(ctx context.Context, info snapshots.Info, fieldpaths ...string) (updated snapshots.Info, err error) {
	err = s.meta.WithTransaction(ctx, true, func(ctx context.Context) error {
		updated, err = storage.UpdateInfo(ctx, info, fieldpaths...)
		return err
	})
	return updated, s.fail("update", info.Name, err)
}

// Walk calls fn for each snapshot that matches the filters. fn may call the snapshotter.
func (s *Snapshotter) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	var all []snapshots.Info
	err := s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		return storage.WalkInfo(ctx, func(_ context.Context, info snapshots.Info) error {
			all = append(all, info)
			return nil
		}, filters...)
	})
	if err != nil {
		return err
	}
	for _, info := range all {
		if err := fn(ctx, info); err != nil {
			return err
		}
	}
	return nil
}

// Usage is what the snapshot adds to the store: the bytes that it doesn't share with its parent's image, and one inode
// for its own. A view has its parent's image and adds nothing.
func (s *Snapshotter) Usage(ctx context.Context, key string) (snapshots.Usage, error) {
	r, err := s.lookup(ctx, key)
	if err != nil {
		return snapshots.Usage{}, err
	}
	if r.info.Kind == snapshots.KindCommitted {
		return r.usage, nil
	}
	usage, err := s.measure(r)
	return usage, s.fail("measure", key, err)
}

func (s *Snapshotter) measure(r record) (snapshots.Usage, error) {
	if r.imageID() != r.id {
		return snapshots.Usage{}, nil
	}
	img, err := s.open(r.id)
	if err != nil {
		return snapshots.Usage{}, err
	}
	defer img.Close()
	var parent *os.File
	if r.parentID != "" {
		if parent, err = s.open(r.parentID); err != nil {
			return snapshots.Usage{}, err
		}
		defer parent.Close()
	}
	n, err := image.Used(img, parent)
	return snapshots.Usage{Size: n, Inodes: 1}, err
}

// Mounts returns how the active snapshot is mounted.
func (s *Snapshotter) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	r, err := s.lookup(ctx, key)
	if err != nil {
		return nil, err
	}
	if r.info.Kind == snapshots.KindCommitted {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("snapshot %q is committed; only active ones and views have mounts", key))
	}
	m, err := s.mounts(r.imageID(), r.info.Kind == snapshots.KindView)
	return m, s.fail("mount", key, err)
}

// hostOptions are how the host mounts an image to write it. A store that is full fails the loop device's writes long after
// the writer has gone, and whoever doesn't sync isn't told: the layer would be committed with zeros for data. So ext4 is
// to give up at the first lost block, which Commit sees. Linux 6.1 does that only with dioread_lock.
var hostOptions = []string{"data_err=abort", "dioread_lock"}

// mounts is one mount of the image. It is ext4 as long as no guest may have written the image.
func (s *Snapshotter) mounts(id string, readonly bool) ([]mount.Mount, error) {
	marked, err := s.marked(id)
	if err != nil {
		return nil, err
	}
	m := mount.Mount{Type: "ext4", Source: s.path(id), Options: []string{"rw", "loop", "discard"}}
	if readonly {
		m.Options = []string{"ro", "loop"}
	}
	switch {
	case marked:
		m.Type = guestmark.MountType
	case !readonly:
		m.Options = append(m.Options, hostOptions...)
	}
	return []mount.Mount{m}, nil
}
