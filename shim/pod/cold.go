package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// orCold decides whether the container goes on from its snapshot, or begins anew with the disk as its checkpoint may say. One that is
// paused, and whose machine can't be restored on this host any more, comes back from its disk, too: what it had in memory is lost,
// which is better than all of it.
func (n *creation) orCold(ctx context.Context) error {
	if n.from == nil {
		return nil
	}
	paused := n.from.pod.Purpose == saved.ForPause
	if n.from.cold {
		n.beginAnew("that is how it was asked for")
		return nil
	}
	err := n.env.Launcher(n.cfg).Restorable(ctx, n.from.info.ID)
	if err != nil && errdefs.IsFailedPrecondition(err) && paused {
		n.log.Warn("the container begins anew with the disk it had: its machine can't be restored", "snapshot", n.from.info.ID, "error", err)
		n.beginAnew(err.Error())
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore container %s: %w", n.ID, err)
	}
	return nil
}

// beginAnew has nothing but the disk be of the snapshot.
func (n *creation) beginAnew(why string) {
	n.cold, n.coldFrom = why, n.from
	n.from, n.saved = nil, nil
}

// coldRoot has the root be a copy of the disk that was saved, in the directory of the machine's disks, and no smaller than the one
// that containerd has prepared for it: the guest has the file system fill it.
func (n *creation) coldRoot(ctx context.Context) (err error) {
	refuse := func(why string) error {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s can't come back from its disk: %s", n.ID, why))
	}
	if len(n.Rootfs) != 1 {
		return refuse("its root is not one image")
	}
	s, err := n.making.store().Open(n.coldFrom.info.ID, n.ID)
	if err != nil {
		return err
	}
	defer s.Close()
	image := s.Images[vmm.RootSerial]
	if !writable(&s.Info, vmm.RootSerial) {
		return refuse("its snapshot has no writable root")
	}
	prepared, err := os.Stat(n.Rootfs[0].Source)
	if err != nil {
		return fmt.Errorf("the disk of container %s: %w", n.ID, err)
	}
	path := filepath.Join(n.making.state.DiskDir, vmm.DiskFile(vmm.RootSerial))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make the disk of container %s: %w", n.ID, err)
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.Remove(path) })
	err = guestmark.Set(f)
	if err == nil {
		_, err = reflink.Clone(ctx, f, image)
	}
	if err == nil {
		err = grow(f, prepared.Size())
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("make the disk of container %s: %w", n.ID, err)
	}
	m := n.Rootfs[0]
	n.Rootfs = []*types.Mount{{Type: m.Type, Source: path, Target: m.Target, Options: m.Options}}
	return nil
}

// grow makes a file larger than it is, if it isn't as large.
func grow(f *os.File, size int64) error {
	st, err := f.Stat()
	if err == nil && st.Size() < size {
		err = f.Truncate(size)
	}
	return err
}

func writable(s *snapshot.Info, serial string) bool {
	for _, d := range s.Disks {
		if d.Serial == serial {
			return !d.ReadOnly && !d.Placeholder
		}
	}
	return false
}
