package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/shim/snapshots"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Save makes a snapshot of a running container: of its machine, with all that runs there. The container goes on. "" has the
// snapshot named after it.
func (c *Client) Save(ctx context.Context, id, name string) (string, error) {
	ctx = c.context(ctx)
	if _, _, err := c.runningTask(ctx, id); err != nil {
		return "", err
	}
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return "", err
	}
	defer shim.Close()
	return shim.Save(ctx, name, "")
}

// Rollback puts a running container back to a snapshot of it: its memory and its disk.
func (c *Client) Rollback(ctx context.Context, id, name string) error {
	ctx = c.context(ctx)
	if _, err := c.container(ctx, id); err != nil {
		return err
	}
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	defer shim.Close()
	_, err = shim.Rollback(ctx, name)
	return err
}

// Clone makes n containers that go on from where a running one is, which goes on, too. Their output goes to their log files.
// It returns the ids of those that there are, also with an error.
func (c *Client) Clone(ctx context.Context, id string, n int) (ids []string, err error) {
	ctx = c.context(ctx)
	parent, err := c.container(ctx, id)
	if err != nil {
		return nil, err
	}
	name, err := c.Save(ctx, id, "")
	if err != nil {
		return nil, err
	}
	defer func() {
		// The clones go on without it.
		_, gone := snapshot.New(c.cfg, slog.New(slog.DiscardHandler)).Delete(name)
		err = errors.Join(err, gone)
	}()
	dir, err := os.MkdirTemp(c.cfg.RunDir, "clone-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := (saved.Checkpoint{Snapshot: name, Container: id}).Write(dir); err != nil {
		return nil, err
	}
	for range n {
		clone, err := c.clone(ctx, parent, dir)
		if err != nil {
			return ids, err
		}
		ids = append(ids, clone)
	}
	return ids, nil
}

// clone makes one of a checkpoint.
func (c *Client) clone(ctx context.Context, parent client.Container, checkpoint string) (id string, err error) {
	id = randomID()
	var u undo.Stack
	defer u.Run(&err)
	cloned, err := cloneSpec(ctx, parent)
	if err != nil {
		return "", err
	}
	image, err := parent.Image(ctx)
	if err != nil {
		return "", fmt.Errorf("look up the image of container %s: %w", parent.ID(), err)
	}
	if err := os.MkdirAll(filepath.Dir(LogPath(c.cfg, id)), 0o700); err != nil {
		return "", fmt.Errorf("make the log directory: %w", err)
	}
	ctr, err := c.ctrd.NewContainer(ctx, id,
		client.WithImage(image),
		client.WithSnapshotter(Snapshotter),
		client.WithNewSnapshot(id, image),
		client.WithImageStopSignal(image, "SIGTERM"),
		client.WithRuntime(Runtime, nil),
		client.WithSpec(cloned))
	if err != nil {
		return "", fmt.Errorf("create container %s: %w", id, err)
	}
	var task client.Task
	u.Push(func() error {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		return c.remove(cctx, ctr, task)
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
		return "", fmt.Errorf("start container %s: %w", id, err)
	}
	return id, nil
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
