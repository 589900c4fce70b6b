package sandbox

import (
	"context"
	"fmt"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
)

// Ref names a container, or a pod sandbox, in all of containerd.
type Ref struct{ Namespace, ID string }

func (r Ref) String() string { return r.Namespace + "/" + r.ID }

// Inventory is what containerd has, in all namespaces.
type Inventory struct {
	// Containers are the containers with their runtimes.
	Containers map[Ref]string
	// Sandboxes are the pod sandboxes that containerd's sandbox service has made.
	Sandboxes map[Ref]struct{}
	Tasks     map[Ref]Task
}

// Task is a container's task.
type Task struct {
	PID uint32
	// Alive says that the task's first process runs, as far as containerd knows.
	Alive bool
}

// Knows says whether containerd has anything of that name.
func (i *Inventory) Knows(r Ref) bool {
	_, container := i.Containers[r]
	_, pod := i.Sandboxes[r]
	_, task := i.Tasks[r]
	return container || pod || task
}

// Inventory lists all that containerd has, this runtime's and others'.
func (c *Client) Inventory(ctx context.Context) (*Inventory, error) {
	spaces, err := c.ctrd.NamespaceService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	inv := &Inventory{Containers: map[Ref]string{}, Sandboxes: map[Ref]struct{}{}, Tasks: map[Ref]Task{}}
	for _, ns := range spaces {
		nctx := namespaces.WithNamespace(ctx, ns)
		// Tasks first: a container that is made meanwhile is then known, and one that ends has no task without it.
		resp, err := c.ctrd.TaskService().List(nctx, &tasks.ListTasksRequest{})
		if err != nil {
			return nil, fmt.Errorf("list tasks of namespace %s: %w", ns, errgrpc.ToNative(err))
		}
		for _, t := range resp.Tasks {
			inv.Tasks[Ref{ns, t.ID}] = Task{PID: t.Pid, Alive: t.Status != task.Status_STOPPED && t.Status != task.Status_UNKNOWN}
		}
		pods, err := c.ctrd.SandboxStore().List(nctx)
		if err != nil {
			return nil, fmt.Errorf("list pod sandboxes of namespace %s: %w", ns, err)
		}
		for _, p := range pods {
			inv.Sandboxes[Ref{ns, p.ID}] = struct{}{}
		}
		records, err := c.ctrd.ContainerService().List(nctx)
		if err != nil {
			return nil, fmt.Errorf("list containers of namespace %s: %w", ns, err)
		}
		for _, r := range records {
			inv.Containers[Ref{ns, r.ID}] = r.Runtime.Name
		}
	}
	return inv, nil
}

// EndsWithin says whether containerd reports the end of a task before limit is over. A task that is gone has ended.
func (c *Client) EndsWithin(ctx context.Context, r Ref, limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(ctx, r.Namespace), limit)
	defer cancel()
	_, err := c.ctrd.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: r.ID})
	return err == nil || errdefs.IsNotFound(errgrpc.ToNative(err))
}
