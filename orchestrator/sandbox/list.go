package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/vmm/record"
)

// Container is one line of List.
type Container struct {
	ID      string    `json:"id"`
	Image   string    `json:"image"`
	Command []string  `json:"command"`
	Created time.Time `json:"created"`
	// Status is created, running, paused, pausing, stopped, or "" for a container without a task. One that is paused to disk
	// has no machine.
	Status string `json:"status"`
	// PID is the host pid of the container's machine, 0 without a task.
	PID uint32 `json:"pid,omitempty"`
	// StoreFull: it stands still until the store has space.
	StoreFull  bool       `json:"store_full,omitempty"`
	ExitStatus *uint32    `json:"exit_status,omitempty"`
	ExitedAt   *time.Time `json:"exited_at,omitempty"`
	PausedAt   *time.Time `json:"paused_at,omitempty"` // to disk
	// Labels are containerd's.
	Labels map[string]string `json:"labels,omitempty"`
}

// List lists this runtime's containers, newest first: those that run, or all.
func (c *Client) List(ctx context.Context, all bool) ([]Container, error) {
	ctx = c.context(ctx)
	records, err := c.ctrd.ContainerService().List(ctx, "runtime.name=="+Runtime)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	resp, err := c.ctrd.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", errgrpc.ToNative(err))
	}
	byID := make(map[string]*task.Process, len(resp.Tasks))
	for _, t := range resp.Tasks {
		byID[t.ID] = t
	}
	machines, err := record.Machines(c.cfg)
	if err != nil {
		return nil, err
	}
	full := map[uint32]bool{} // by pid
	for _, m := range machines {
		full[uint32(m.State.QEMU.PID)] = m.Full
	}
	out := []Container{} // an empty list is one, in JSON too
	for _, r := range records {
		k := describe(r, byID[r.ID])
		if k.Status == "" || k.ExitStatus != nil {
			c.describePaused(ctx, &k)
		}
		k.StoreFull = full[k.PID] && k.ExitStatus == nil
		if all || k.Status != "" && k.Status != "stopped" {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, func(a, b Container) int { return b.Created.Compare(a.Created) })
	return out, nil
}

// Get describes one container.
func (c *Client) Get(ctx context.Context, id string) (Container, error) {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return Container{}, err
	}
	r, err := ctr.Info(ctx)
	if err != nil {
		return Container{}, fmt.Errorf("look up container %s: %w", id, err)
	}
	resp, err := c.ctrd.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return Container{}, fmt.Errorf("look up the task of container %s: %w", id, err)
	}
	k := describe(r, resp.GetProcess())
	if k.Status == "" || k.ExitStatus != nil {
		c.describePaused(ctx, &k)
	}
	return k, nil
}

func describe(r containers.Container, t *task.Process) Container {
	k := Container{ID: r.ID, Image: r.Image, Created: r.CreatedAt, Labels: r.Labels}
	var spec specs.Spec
	if r.Spec != nil && typeurl.UnmarshalTo(r.Spec, &spec) == nil && spec.Process != nil {
		k.Command = spec.Process.Args
	}
	if t == nil {
		return k
	}
	k.Status, k.PID = strings.ToLower(t.Status.String()), t.Pid
	if t.Status == task.Status_STOPPED {
		at := t.ExitedAt.AsTime()
		k.ExitStatus, k.ExitedAt = &t.ExitStatus, &at
	}
	return k
}

// describePaused tells of a container whose task has ended, if there was one, that it is paused to disk.
func (c *Client) describePaused(ctx context.Context, k *Container) {
	cp, err := c.paused(ctx, k.ID).Checkpoint()
	if errdefs.IsNotFound(err) {
		return
	}
	k.Status, k.PID, k.ExitStatus, k.ExitedAt = "paused", 0, nil, nil
	if err == nil { // otherwise a resume tells why it can't be
		k.PausedAt = &cp.Time
	}
}
