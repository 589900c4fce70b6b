package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/shim/snapshots"
)

// paused is what says whether a container of the context's namespace is paused to disk.
func (c *Client) paused(ctx context.Context, id string) saved.Paused {
	ns, _ := namespaces.Namespace(ctx)
	return saved.PausedOf(c.cfg, ns, id)
}

// isPaused tells whether one without a task that runs is paused.
func (c *Client) isPaused(ctx context.Context, id string) bool {
	_, err := c.paused(ctx, id).Checkpoint()
	return !errdefs.IsNotFound(err)
}

// errPaused is the error of what needs a container to run that is paused to disk.
func errPaused(id string) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is paused: `cube resume %s` has it go on", id, id))
}

// Pause saves a running container to disk and ends its machine: it takes no memory and no process until it is resumed, and
// outlives the host's. After an error it runs on, or is paused if the error says so.
func (c *Client) Pause(ctx context.Context, id string) error { return c.pause(ctx, id, false) }

// PauseCold is Pause for a container whose memory isn't needed: only its disk is saved, with which a resume begins anew.
func (c *Client) PauseCold(ctx context.Context, id string) error { return c.pause(ctx, id, true) }

func (c *Client) pause(ctx context.Context, id string, cold bool) error {
	ctx = c.context(ctx)
	ctr, _, err := c.runningTask(ctx, id)
	if err != nil {
		return err
	}
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	defer shim.Close()
	if err := shim.Pause(ctx, id, cold); err != nil {
		return err
	}
	// What can't be deleted, a resume deletes.
	ctx, cancel := c.cleanup(ctx)
	defer cancel()
	if err := c.endTask(ctx, ctr); err != nil {
		return fmt.Errorf("container %s is paused, but: %w", id, err)
	}
	return nil
}

// Resume has a paused container go on, with its output in its log file. note says why it didn't from its memory, but began
// anew with its disk; "" if it did. After an error it is paused, if the error doesn't say that it runs.
func (c *Client) Resume(ctx context.Context, id string) (note string, err error) {
	return c.resume(ctx, id, false)
}

// ResumeCold has a paused container begin anew with its disk.
func (c *Client) ResumeCold(ctx context.Context, id string) error {
	_, err := c.resume(ctx, id, true)
	return err
}

func (c *Client) resume(ctx context.Context, id string, cold bool) (note string, err error) {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return "", err
	}
	paused := c.paused(ctx, id)
	// Until all is settled: a pause that comes next writes a checkpoint of its own.
	unlock, err := paused.Lock(ctx)
	if err != nil {
		return "", err
	}
	defer unlock()
	cp, err := paused.Checkpoint()
	if err != nil {
		return "", err
	}
	note, runs, err := c.resumed(ctx, ctr, cp.Snapshot)
	if err != nil {
		return "", err
	}
	if !runs {
		if cp.Cold != cold { // as an attempt before this one had it
			cp.Cold = cold
			if err := paused.Write(cp); err != nil {
				return "", err
			}
		}
		if note, err = c.goOn(ctx, ctr, string(paused)); err != nil {
			return "", err
		}
	}
	if err := errors.Join(paused.End(cp.Snapshot), deleteSnapshot(c.cfg, cp.Snapshot)); err != nil {
		return note, fmt.Errorf("container %s runs, but what it was paused with is still there: %w", id, err)
	}
	return note, nil
}

// resumed tells whether the container has gone on from the snapshot already: whoever resumed it has died just then.
func (c *Client) resumed(ctx context.Context, ctr client.Container, snapshot string) (note string, runs bool, err error) {
	task, err := ctr.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("look up the task of container %s: %w", ctr.ID(), err)
	}
	st, err := task.Status(ctx)
	if errdefs.IsNotFound(err) || err == nil && (st.Status == client.Created || st.Status == client.Stopped) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("look up the task of container %s: %w", ctr.ID(), err)
	}
	stats, err := c.stats(ctx, ctr.ID())
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) { // it has ended
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("ask what container %s was made from: %w", ctr.ID(), err)
	}
	return stats.Cold, stats.Snapshot == snapshot, nil
}

// goOn makes the container's task of the checkpoint in the directory.
func (c *Client) goOn(ctx context.Context, ctr client.Container, checkpoint string) (note string, err error) {
	spec, err := ctr.Spec(ctx)
	if err != nil {
		return "", fmt.Errorf("read the spec of container %s: %w", ctr.ID(), err)
	}
	if err := c.endTask(ctx, ctr); err != nil { // of a pause or a resume that was cut short
		return "", err
	}
	if err := c.unbundled(ctx, ctr.ID()); err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(LogPath(c.cfg, ctr.ID())), 0o700); err != nil {
		return "", fmt.Errorf("make the log directory: %w", err)
	}
	creator := cio.LogURI(logURI(c.cfg, ctr.ID()))
	if spec.Process.Terminal {
		creator = cio.TerminalLogURI(logURI(c.cfg, ctr.ID()))
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		return errors.Join(c.Await(cctx), c.endTask(cctx, ctr))
	})
	tctx, cancel := c.patient(ctx)
	defer cancel()
	task, err := ctr.NewTask(tctx, creator, client.WithRestoreImagePath(checkpoint))
	if err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = task.Start(tctx)
	}
	if err != nil {
		return "", fmt.Errorf("resume container %s: %w", ctr.ID(), err)
	}
	stats, err := c.stats(ctx, ctr.ID())
	if err != nil {
		return "", nil // it has ended since: all that there was to say is in the log
	}
	return stats.Cold, nil
}

// unbundled refuses a container without a task whose bundle is still there: containerd can't make another one, and has no
// class for that error.
func (c *Client) unbundled(ctx context.Context, id string) error {
	if c.cfg.Containerd.Address != "" {
		return nil // where an existing containerd has them is its own business
	}
	ns, _ := namespaces.Namespace(ctx)
	_, err := os.Lstat(filepath.Join(c.cfg.BundleDir(), ns, id))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for what is left of container %s: %w", id, err)
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf(
		"containerd is still ending what was left of container %s by an attempt that was cut short: try again; `cube doctor` tells of what stays", id))
}
