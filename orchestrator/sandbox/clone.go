package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// clonedLabel is a clone's label with the snapshot that it was made of. As long as that one exists, the clones are being made,
// or whoever made them has died; its deletion makes them what they are, all at once.
const clonedLabel = "io.cube.cloned-from"

// cloneParallel bounds how many clones are made at once.
const cloneParallel = 4

// Origin is what clones are made of: a snapshot of a running container, which is there for nothing else.
type Origin struct {
	c        *Client
	parent   client.Container
	image    client.Image
	spec     *specs.Spec
	snapshot string
	dir      string // with the checkpoint; locked
	undo     undo.Stack
	// stuck: clones are there that must go, and can't.
	stuck bool
}

// Origin saves a running container, which goes on, for clones of it. It must be closed.
func (c *Client) Origin(ctx context.Context, id string) (_ *Origin, err error) {
	ctx = c.context(ctx)
	o := &Origin{c: c, snapshot: "clone-" + randomID() + randomID()}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.undo.Release())
		}
	}()
	if o.parent, err = c.container(ctx, id); err != nil {
		return nil, err
	}
	if o.spec, err = cloneSpec(ctx, o.parent); err != nil {
		return nil, err
	}
	if o.image, err = o.parent.Image(ctx); err != nil {
		return nil, fmt.Errorf("look up the image of container %s: %w", id, err)
	}
	dir, release, err := c.claim(ctx, o.snapshot)
	if err != nil {
		return nil, fmt.Errorf("make the clones' directory: %w", err)
	}
	o.dir = dir
	o.undo.Push(release)
	o.undo.Push(func() error { // that of a save that has been given up, too
		if o.stuck {
			return nil // UndoClones goes on with it
		}
		return deleteSnapshot(c.cfg, o.snapshot)
	})
	if _, err := c.save(ctx, id, o.snapshot, saved.ForClone); err != nil {
		return nil, err
	}
	return o, (saved.Checkpoint{Snapshot: o.snapshot, Container: id}).Write(o.dir)
}

// claim makes a directory that is locked as long as this process lives and something is made of the checkpoint in it.
func (c *Client) claim(ctx context.Context, name string) (dir string, release func() error, err error) {
	dir = filepath.Join(CloneDir(c.cfg), name)
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", nil, err
		}
		unlock, err := flock.LockDir(ctx, dir, false)
		if errors.Is(err, fs.ErrNotExist) { // taken for one of a process that has died
			continue
		}
		if err != nil {
			return "", nil, err
		}
		return dir, func() error {
			defer unlock()
			return os.RemoveAll(dir)
		}, nil
	}
}

// Close deletes the snapshot. The clones go on without it.
func (o *Origin) Close() error { return o.undo.Release() }

// Clone makes n containers, some at a time. Their output goes to their log files. It returns the ids of those that there are,
// and an error for each that there isn't. When ctx ends there is none.
func (o *Origin) Clone(ctx context.Context, n int) (ids []string, failed []error) {
	ctx = o.c.context(ctx)
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(cloneParallel)
	for range n {
		g.Go(func() error {
			err := context.Cause(ctx)
			var id string
			if err == nil {
				id, err = o.clone(ctx)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
			} else {
				ids = append(ids, id)
			}
			return nil
		})
	}
	_ = g.Wait() // the functions collect their errors
	if ctx.Err() == nil {
		return ids, failed
	}
	failed = []error{context.Cause(ctx)} // of all of them
	if err := o.c.removeClones(ctx, o.snapshot); err != nil {
		o.stuck = true
		failed = append(failed, err)
	}
	return nil, failed
}

// clone makes one.
func (o *Origin) clone(ctx context.Context) (id string, err error) {
	id = randomID()
	return id, o.c.restore(ctx, id, o.image, o.specOf(id), o.dir, map[string]string{clonedLabel: o.snapshot})
}

// restore makes a container that goes on from the checkpoint in a directory, with its output in its log file.
func (c *Client) restore(ctx context.Context, id string, image client.Image, spec *specs.Spec, checkpoint string, labels map[string]string) (err error) {
	var u undo.Stack
	defer u.Run(&err)
	if err := os.MkdirAll(filepath.Dir(LogPath(c.cfg, id)), 0o700); err != nil {
		return fmt.Errorf("make the log directory: %w", err)
	}
	ctx, done, err := c.lease(ctx)
	if err != nil {
		return err
	}
	defer done()
	ctr, err := c.ctrd.NewContainer(ctx, id,
		client.WithImage(image),
		client.WithSnapshotter(Snapshotter),
		client.WithNewSnapshot(id, image),
		client.WithImageStopSignal(image, "SIGTERM"),
		client.WithRuntime(Runtime, nil),
		client.WithSpec(spec),
		client.WithAdditionalContainerLabels(labels))
	if err != nil {
		return fmt.Errorf("create container %s: %w", id, err)
	}
	var task client.Task
	u.Push(func() error {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		return errors.Join(c.Await(cctx), c.remove(cctx, ctr, task))
	})
	tctx, cancel := c.patient(ctx)
	defer cancel()
	if task, err = ctr.NewTask(tctx, cio.LogURI(logURI(c.cfg, id)), client.WithRestoreImagePath(checkpoint)); err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = task.Start(tctx)
	}
	if err != nil {
		return fmt.Errorf("start container %s: %w", id, err)
	}
	return nil
}

// removeClones removes all clones of a snapshot, whatever state they are in. It goes on after ctx has ended.
func (c *Client) removeClones(ctx context.Context, snapshot string) error {
	ctx, cancel := c.cleanup(c.context(ctx))
	defer cancel()
	if err := c.Await(ctx); err != nil {
		return err
	}
	list, err := c.ctrd.Containers(ctx, fmt.Sprintf("labels.%q==%s", clonedLabel, snapshot))
	if err != nil {
		return fmt.Errorf("look for unfinished clones: %w", err)
	}
	var errs []error
	for _, ctr := range list {
		errs = append(errs, c.remove(ctx, ctr, nil))
	}
	return errors.Join(errs...)
}

// UndoClones removes the clones that processes which have died were making, then the snapshots of which they made them. It
// returns the names of those.
func (c *Client) UndoClones(ctx context.Context) (undone []string, err error) {
	store := snapshot.New(c.cfg, slog.New(slog.DiscardHandler))
	all, err := store.List()
	errs := []error{err}
	for _, info := range all {
		p, err := saved.Decode(info.Note)
		if info.Damage != "" || err != nil || p.Purpose != saved.ForClone || Cloning(c.cfg, info.ID) {
			continue
		}
		// Only then: whoever has made all of them since has deleted it before giving it up, and the clones are there to stay.
		if _, err := store.Inspect(info.ID); errdefs.IsNotFound(err) {
			continue
		}
		err = c.removeClones(ctx, info.ID)
		if err == nil {
			err = deleteSnapshot(c.cfg, info.ID)
		}
		errs = append(errs, err)
		undone = append(undone, info.ID)
	}
	return undone, errors.Join(append(errs, clearClaims(c.cfg))...)
}

// CloneDir has a directory for each snapshot that clones are being made of, locked by who makes them.
func CloneDir(cfg *config.Config) string { return filepath.Join(cfg.RunDir, "clones") }

// Cloning tells whether somebody makes clones of that snapshot.
func Cloning(cfg *config.Config, snapshot string) bool {
	unlock, err := flock.TryLockDir(filepath.Join(CloneDir(cfg), snapshot))
	if err == nil {
		unlock()
	}
	return errors.Is(err, flock.ErrLocked)
}

// clearClaims removes what processes that have died have claimed.
func clearClaims(cfg *config.Config) error {
	entries, err := os.ReadDir(CloneDir(cfg))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		dir := filepath.Join(CloneDir(cfg), e.Name())
		unlock, err := flock.TryLockDir(dir)
		if errors.Is(err, flock.ErrLocked) {
			continue
		}
		if err == nil {
			err = os.RemoveAll(dir)
			unlock()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func deleteSnapshot(cfg *config.Config, name string) error {
	_, err := snapshot.New(cfg, slog.New(slog.DiscardHandler)).Delete(name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// specOf is the spec of the clone with that id. One that is called by its id is not called by its parent's.
func (o *Origin) specOf(id string) *specs.Spec {
	s := *o.spec
	if s.Hostname == hostname(o.parent.ID()) {
		s.Hostname = hostname(id)
	}
	return &s
}

// cloneSpec is the spec of a container's clones. A host port has one container.
func cloneSpec(ctx context.Context, parent client.Container) (*specs.Spec, error) {
	s, err := parent.Spec(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the spec of container %s: %w", parent.ID(), err)
	}
	if s.Process.Terminal {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s has a terminal, which can't be in several places: run it without -t", parent.ID()))
	}
	var settings network.Settings
	if json.Unmarshal([]byte(s.Annotations[spec.NetworkKey]), &settings) != nil {
		return s, nil // "none", or not by an annotation
	}
	settings.Ports = nil
	b, err := json.Marshal(settings)
	if err != nil {
		return nil, err
	}
	s.Annotations[spec.NetworkKey] = string(b)
	return s, nil
}
