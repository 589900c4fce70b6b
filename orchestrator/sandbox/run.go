package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/internal/undo"
)

// created is a container with a task that hasn't been started.
type created struct {
	ctr  client.Container
	task client.Task
}

// RunDetached starts a container whose output goes to its log file and returns its id.
func (c *Client) RunDetached(ctx context.Context, s Spec, p Progress) (id string, err error) {
	ctx = c.context(ctx)
	if s.Process.TTY {
		return "", errors.New("a terminal needs someone in front of it: leave out either -d or -t")
	}
	if s.ID == "" {
		s.ID = randomID()
	}
	if err := identifiers.Validate(s.ID); err != nil {
		return "", fmt.Errorf("%q can't be a container's id: %w", s.ID, err)
	}
	var u undo.Stack
	defer u.Run(&err)
	if err := os.MkdirAll(filepath.Dir(LogPath(c.cfg, s.ID)), 0o700); err != nil {
		return "", fmt.Errorf("make the log directory: %w", err)
	}
	made, err := c.create(ctx, &u, s, cio.LogURI(logURI(c.cfg, s.ID)), p)
	if err != nil {
		return "", err
	}
	if err := made.task.Start(ctx); err != nil {
		return "", fmt.Errorf("start container %s: %w", s.ID, err)
	}
	return s.ID, nil
}

// Run starts a container, attaches stdio and returns its exit code once it has ended and its output is written. remove
// removes the container afterwards; without it the container and its disk stay.
func (c *Client) Run(ctx context.Context, s Spec, stdio Stdio, remove bool, p Progress) (code int, err error) {
	ctx = c.context(ctx)
	if s.ID == "" {
		s.ID = randomID()
	}
	term, err := stdio.prepare(s.Process.TTY)
	if err != nil {
		return 0, err
	}
	defer term.restore()
	wasPaused := false
	defer func() {
		if err == nil && wasPaused {
			err = errPaused(s.ID)
		}
	}()
	var u undo.Stack
	defer u.Run(&err)
	made, err := c.create(ctx, &u, s, term.creator(c.fifoDir()), p)
	if err != nil {
		return 0, err
	}
	code, err = c.attend(ctx, term, made.task)
	if err != nil {
		return 0, fmt.Errorf("container %s: %w", s.ID, err)
	}
	cctx, cancel := c.cleanup(ctx)
	defer cancel()
	if wasPaused = c.isPaused(cctx, s.ID); wasPaused {
		return code, nil // the task is deleted by whoever has paused it
	}
	if remove {
		return code, c.remove(cctx, made.ctr, made.task)
	}
	if _, err := made.task.Delete(cctx); err != nil && !errdefs.IsNotFound(err) {
		return code, fmt.Errorf("delete the task of container %s: %w", s.ID, err)
	}
	return code, nil
}

// create makes the container and its task; u undoes both.
func (c *Client) create(ctx context.Context, u *undo.Stack, s Spec, creator cio.Creator, p Progress) (created, error) {
	leased, done, err := c.lease(ctx)
	if err != nil {
		return created{}, err
	}
	defer done()
	img, err := c.ensure(leased, s.Image, s.Outside, p)
	if err != nil {
		return created{}, err
	}
	imageSpec, err := img.Spec(ctx)
	if err != nil {
		return created{}, fmt.Errorf("read image %s: %w", img.Name(), err)
	}
	opts, err := s.options(imageSpec.Config)
	if err != nil {
		return created{}, err
	}
	ctr, err := c.ctrd.NewContainer(leased, s.ID,
		client.WithImage(img),
		client.WithSnapshotter(Snapshotter),
		client.WithNewSnapshot(s.ID, img, s.disk()...),
		client.WithImageStopSignal(img, "SIGTERM"),
		client.WithRuntime(Runtime, nil),
		client.WithNewSpec(opts...),
		client.WithAdditionalContainerLabels(s.Labels))
	if errdefs.IsAlreadyExists(err) {
		return created{}, fmt.Errorf("container %s exists already: remove it with `cube rm %s` or take another id", s.ID, s.ID)
	}
	if err != nil {
		return created{}, fmt.Errorf("create container %s: %w", s.ID, err)
	}
	var task client.Task
	u.Push(func() error {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		return c.remove(cctx, ctr, task)
	})
	var from []client.NewTaskOpts
	if s.From != "" {
		dir, release, err := c.checkpoint(ctx, s.ID, s.From, true)
		if err != nil {
			return created{}, err
		}
		defer release() // a directory that is left is removed by the next cube up
		from = append(from, client.WithRestoreImagePath(dir))
	}
	tctx, cancel := c.patient(ctx)
	defer cancel()
	if task, err = ctr.NewTask(tctx, creator, from...); err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return created{}, fmt.Errorf("start container %s: %w", s.ID, err)
	}
	return created{ctr: ctr, task: task}, nil
}

// attend starts a process and stays with it until it has ended: it passes signals, the terminal's size and the end of
// stdin on. The output has been written when it returns.
func (c *Client) attend(ctx context.Context, term *terminal, p client.Process) (int, error) {
	// The process outlives a ctx that an interrupt cancels: from here on, signals are the process's.
	ctx = context.WithoutCancel(ctx)
	exit, err := p.Wait(ctx)
	if err != nil {
		return 0, err
	}
	if err := p.Start(ctx); err != nil {
		return 0, err
	}
	stop := term.forward(ctx, p)
	defer stop()
	status := <-exit
	for errdefs.IsUnavailable(errgrpc.ToNative(status.Error())) {
		// containerd has gone, which the process doesn't feel, and may come back.
		if err := c.Await(ctx); err != nil {
			return 0, errors.Join(status.Error(), err)
		}
		if exit, err = p.Wait(ctx); err != nil {
			return 0, err
		}
		status = <-exit
	}
	code, _, err := status.Result()
	if err != nil {
		return 0, fmt.Errorf("wait for its end: %w", errgrpc.ToNative(err))
	}
	if stdio := p.IO(); stdio != nil {
		stdio.Wait()
	}
	return int(code), nil
}

// Exec runs a further process in a running container and returns its exit code.
func (c *Client) Exec(ctx context.Context, id string, proc Process, stdio Stdio) (code int, err error) {
	ctx = c.context(ctx)
	ctr, task, err := c.runningTask(ctx, id)
	if err != nil {
		return 0, err
	}
	spec, err := ctr.Spec(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the spec of container %s: %w", id, err)
	}
	ps, err := execProcess(spec.Process, proc)
	if err != nil {
		return 0, err
	}
	term, err := stdio.prepare(proc.TTY)
	if err != nil {
		return 0, err
	}
	defer term.restore()
	var u undo.Stack
	defer u.Run(&err)
	p, err := task.Exec(ctx, "exec-"+randomID(), ps, term.creator(c.fifoDir()))
	if err != nil {
		return 0, fmt.Errorf("container %s: %w", id, err)
	}
	remove := func(opts ...client.ProcessDeleteOpts) error {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		if _, err := p.Delete(cctx, opts...); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("delete the process: %w", err)
		}
		return nil
	}
	u.Push(func() error { return remove(client.WithProcessKill) })
	code, err = c.attend(ctx, term, p)
	if err != nil {
		return 0, err
	}
	return code, remove()
}
