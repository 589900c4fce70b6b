package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// stopParallel bounds how many containers StopAll stops at once.
const stopParallel = 8

// Remove removes a container with its disk and log. A running one must be killed, which only force does.
func (c *Client) Remove(ctx context.Context, id string, force bool) error {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return err
	}
	if force {
		return c.remove(ctx, ctr, nil)
	}
	if err := c.idle(ctx, ctr); err != nil {
		return err
	}
	return c.removeIf(ctx, ctr, func() error { return c.idle(ctx, ctr) }) // it may have been resumed
}

// idle refuses a container whose task runs.
func (c *Client) idle(ctx context.Context, ctr client.Container) error {
	task, err := ctr.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up the task of container %s: %w", ctr.ID(), err)
	}
	st, err := task.Status(ctx)
	if err == nil && (st.Status == client.Running || st.Status == client.Paused || st.Status == client.Pausing) {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is %s: stop it first, or use -f", ctr.ID(), st.Status))
	}
	return nil // of one that can't tell, what is left is deleted
}

// remove kills and deletes the container's task, if any, and deletes the container with its disk and log. task may be
// nil: it is looked up then.
func (c *Client) remove(ctx context.Context, ctr client.Container, task client.Task) error {
	end := func() error { return c.endTask(ctx, ctr) }
	if task != nil {
		end = func() error { return deleteTask(ctx, task) } // it has the client's ends of the stdio
	}
	if err := end(); err != nil { // a pause or a resume that is under way, and has the lock, is called off by this
		return err
	}
	return c.removeIf(ctx, ctr, func() error { return nil })
}

// removeIf is remove for a container that nobody pauses or resumes meanwhile, if may has no objection then. It needs no space.
func (c *Client) removeIf(ctx context.Context, ctr client.Container, may func() error) error {
	paused := c.paused(ctx, ctr.ID())
	unlock, _, err := paused.LockExisting(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := may(); err != nil {
		return err
	}
	if err := c.endTask(ctx, ctr); err != nil {
		return err
	}
	if err := c.forget(paused); err != nil {
		return err
	}
	if err := ctr.Delete(ctx, client.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete container %s: %w", ctr.ID(), err)
	}
	if err := removeLog(LogPath(c.cfg, ctr.ID())); err != nil {
		return fmt.Errorf("delete the log of container %s: %w", ctr.ID(), err)
	}
	return nil
}

// endTask deletes the container's task, whatever state it is in, if there is one.
func (c *Client) endTask(ctx context.Context, ctr client.Container) error {
	task, err := ctr.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up the task of container %s: %w", ctr.ID(), err)
	}
	return deleteTask(ctx, task)
}

// deleteTask kills what runs of a task and deletes it, if it is still there.
func deleteTask(ctx context.Context, task client.Task) error {
	if _, err := task.Delete(ctx, client.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete the task of container %s: %w", task.ID(), err)
	}
	return nil
}

// Stop ends a container: its stop signal, and SIGKILL after grace. It is nothing to do for a container that doesn't run.
func (c *Client) Stop(ctx context.Context, id string, grace time.Duration) error {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return err
	}
	if _, _, err := c.runningTask(ctx, id); err != nil && c.isPaused(ctx, id) {
		return err
	}
	return c.stop(ctx, ctr, grace)
}

// stop ends the container's task, if any, and deletes it.
func (c *Client) stop(ctx context.Context, ctr client.Container, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+c.cfg.Timeout(cleanupTimeout))
	defer cancel()
	task, err := ctr.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up the task of container %s: %w", ctr.ID(), err)
	}
	if grace > 0 {
		if err := c.terminate(ctx, ctr, task, grace); err != nil {
			return err
		}
	}
	if _, err := task.Delete(ctx, client.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("stop container %s: %w", ctr.ID(), err)
	}
	return nil
}

// terminate sends the stop signal and returns when the task has ended or grace is over.
func (c *Client) terminate(ctx context.Context, ctr client.Container, task client.Task, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	exit, err := task.Wait(ctx)
	if err != nil {
		return fmt.Errorf("wait for container %s: %w", ctr.ID(), err)
	}
	sig, err := client.GetStopSignal(ctx, ctr, unix.SIGTERM)
	if err != nil {
		sig = unix.SIGTERM // the image names one that isn't known here
	}
	if err := task.Kill(ctx, sig); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("stop container %s: %w", ctr.ID(), err)
	}
	<-exit // the wait ends with ctx at the latest
	return nil
}

// StopAll stops all tasks of all namespaces that keep selects by their runtime. The containers' records and disks stay.
// It returns how many it stopped.
func (c *Client) StopAll(ctx context.Context, grace time.Duration, keep func(runtime string) bool) (int, error) {
	spaces, err := c.ctrd.NamespaceService().List(ctx)
	if err != nil {
		return 0, fmt.Errorf("list namespaces: %w", err)
	}
	var (
		mu    sync.Mutex
		count int
		errs  []error
		group errgroup.Group
	)
	group.SetLimit(stopParallel)
	for _, ns := range spaces {
		nctx := namespaces.WithNamespace(ctx, ns)
		list, err := c.ctrd.Containers(nctx)
		if err != nil {
			return count, fmt.Errorf("list containers of namespace %s: %w", ns, err)
		}
		for _, ctr := range list {
			info, err := ctr.Info(nctx, client.WithoutRefreshedMetadata)
			if err != nil || !keep(info.Runtime.Name) {
				continue
			}
			if _, err := ctr.Task(nctx, nil); errdefs.IsNotFound(err) {
				continue
			}
			group.Go(func() error {
				err := c.stop(nctx, ctr, grace)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					errs = append(errs, err)
				} else {
					count++
				}
				return nil
			})
		}
	}
	_ = group.Wait() // the functions collect their errors
	return count, errors.Join(errs...)
}
