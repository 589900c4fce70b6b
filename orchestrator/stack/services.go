package stack

import (
	"context"
	"errors"
	"fmt"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/snapshotter"
	"github.com/cubesandbox/cube/snapshotter/store"
	"github.com/cubesandbox/cube/vmm"
)

// startStore makes or mounts what images and snapshots are kept in. It is unmounted when the stack ends, unless machines
// that go on have disks in it.
func (s *stack) startStore(ctx context.Context) error {
	st, err := store.Ensure(ctx, s.cfg, s.Log.With("part", "store"))
	if err != nil {
		return err
	}
	s.undo.Push(func() error {
		err := st.Release()
		if errors.Is(err, store.ErrBusy) {
			return nil
		}
		return err
	})
	return nil
}

// releaseStore unmounts the store of a stack that is no more.
func releaseStore(cfg *config.Config) error {
	st, err := store.Inspect(cfg)
	if err != nil || st.Kind != store.Image || !st.Ready {
		return nil // what can't be a store isn't mounted as one
	}
	switch err := unix.Unmount(st.Dir, 0); {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("the store at %s is still in use: `fuser -vm %s` says by whom", st.Dir, st.Dir)
	case err != nil:
		return fmt.Errorf("unmount the store at %s: %w", st.Dir, err)
	}
	return nil
}

// startNetwork has sandboxes' network up, and keeps it so in this process. It stays in force when the stack ends.
func (s *stack) startNetwork(ctx context.Context) error {
	if err := s.network.Up(ctx); err != nil {
		return err
	}
	s.undo.Push(s.network.Close)
	s.group.Go(func() error { return s.network.Run(s.life) })
	s.board.SetProbe("network", s.network.Probe)
	return nil
}

// proveAccelerator decides what executes guests, which may take a trial.
func (s *stack) proveAccelerator(ctx context.Context) (err error) {
	s.verdict, err = s.launcher.Accelerator(ctx)
	return err
}

// warmBase makes the base snapshot of the default machine and keeps its memory, so that containers are restored from
// the first one on.
func (s *stack) warmBase(ctx context.Context) error {
	w, err := s.launcher.Warm(ctx, vmm.Shape{VCPUs: s.cfg.VM.VCPUs, MemoryMiB: int(s.cfg.VM.Memory / units.MiB)})
	if err != nil {
		return err
	}
	s.undo.Push(w.Release)
	return nil
}

// openAPI has the API serve, when what an earlier life has left of clones and of paused containers is gone.
func (s *stack) openAPI(ctx context.Context) error {
	c, err := sandbox.Connect(ctx, s.cfg)
	if err != nil {
		return err
	}
	s.undo.Push(c.Close)
	undone, err := c.UndoClones(ctx)
	if len(undone) > 0 {
		s.Log.Info("removed the clones that were being made", "snapshots", undone)
	}
	if err != nil {
		s.Log.Warn("unfinished clones can't all be removed", "error", err)
	}
	if err := c.DropLeases(ctx); err != nil {
		s.Log.Warn("what was kept for containers that were being made can't all be let go", "error", err)
	}
	if err := c.SettlePaused(ctx); err != nil {
		s.Log.Warn("what containers were paused with that needn't it any more can't all be removed", "error", err)
	}
	s.api.Open(c, s.audit)
	return nil
}

// startSnapshotter serves the snapshotter in this process and makes sure that it answers where containerd will ask.
func (s *stack) startSnapshotter(ctx context.Context) error {
	ready := make(chan struct{})
	failed := make(chan error, 1)
	s.group.Go(func() error {
		err := snapshotter.Serve(s.life, s.cfg, s.Log.With("part", "snapshotter"), s.makeRoom, func() { close(ready) })
		failed <- err
		return err
	})
	select {
	case <-ready:
	case err := <-failed:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
	conn, err := grpc.NewClient("unix://"+s.cfg.SnapshotterSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	s.undo.Push(conn.Close)
	probe := func(ctx context.Context) error {
		sn := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), snapshotter.Name)
		// There is no such snapshot, as it will say when it can look.
		if _, err := sn.Stat(ctx, "readiness"); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("doesn't answer at %s: %w", s.cfg.SnapshotterSocket(), err)
		}
		return nil
	}
	if err := probe(ctx); err != nil {
		return err
	}
	s.board.SetProbe("snapshotter", probe)
	return nil
}
