package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/snapshotter/image"
)

// Commit makes the active snapshot key the committed snapshot name. Its image must be unmounted, without errors, and
// never have been a guest's disk.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	return s.fail("commit", key, s.commit(ctx, name, key, opts))
}

func (s *Snapshotter) commit(ctx context.Context, name, key string, opts []snapshots.Opt) error {
	var info snapshots.Info
	for _, opt := range opts {
		if err := opt(&info); err != nil {
			return err
		}
	}
	r, err := s.lookup(ctx, key)
	switch {
	case err != nil:
		return err
	case r.info.Kind != snapshots.KindActive:
		return errdefs.ErrFailedPrecondition.WithMessage("it is not active")
	case info.Parent != "" && info.Parent != r.info.Parent:
		return errdefs.ErrFailedPrecondition.WithMessage("a disk image can't get another parent: turn parallel unpacking off for this snapshotter")
	}
	img, err := s.open(r.id)
	if err != nil {
		return err
	}
	defer img.Close()
	release, err := s.seal(ctx, r.id, img)
	if err != nil {
		return err
	}
	defer release()
	if err := img.Sync(); err != nil {
		return err
	}
	killpoint("synced")
	usage, err := s.measure(r)
	if err != nil {
		return err
	}
	err = s.meta.WithTransaction(ctx, true, func(ctx context.Context) error {
		id, err := storage.CommitActive(ctx, key, name, usage, inheritSize(opts, info.Labels, r.info.Labels)...)
		if err == nil && id != r.id {
			err = errdefs.ErrUnavailable.WithMessage("it was replaced meanwhile; try again")
		}
		return err
	})
	killpoint("committed")
	return err
}

// seal keeps writers from the image until release, having made sure that the host may read its file system.
func (s *Snapshotter) seal(ctx context.Context, id string, img *os.File) (release func(), err error) {
	if err := s.refuseGuestWritten(id); err != nil {
		return nil, err // at once, while the machine still runs
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(settleWait))
	defer cancel()
	unlock, err := image.Settle(ctx, img)
	if errors.Is(err, image.ErrBusy) {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%v: unmount %s, or stop the container that uses it, and try again", err, img.Name()))
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unlock()
		}
	}()
	if err := s.refuseGuestWritten(id); err != nil {
		return nil, err
	}
	if err := image.CheckClean(img); err != nil {
		if errors.Is(err, image.ErrNotClean) {
			err = errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%v; a store that was full for a while does that: see that %s has room, remove the snapshot and try again", err, s.cfg.StoreDir()))
		}
		return nil, err
	}
	return unlock, nil
}

func (s *Snapshotter) refuseGuestWritten(id string) error {
	marked, err := s.marked(id)
	if err == nil && marked {
		err = errdefs.ErrFailedPrecondition.WithMessage(guestmark.Refusal)
	}
	return err
}
