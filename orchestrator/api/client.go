package api

import (
	"context"
	"errors"
	"net/http"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/usage"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Client asks the daemon of a stack. Errors are of the classes of errdefs; errdefs.ErrUnavailable if no daemon answers. A
// request has no deadline beyond that of its context: the daemon has its own.
type Client struct{ socket string }

// NewClient makes a client of the stack with that configuration.
func NewClient(cfg *config.Config) *Client { return &Client{cfg.ControlSocket()} }

// on asks for something to be done to a container. What isn't an id is no part of a path, whatever the daemon thinks of it.
func (c *Client) on(ctx context.Context, id, verb string, in, out any) error {
	if err := validID(id); err != nil {
		return err
	}
	return control.Send(ctx, c.socket, http.MethodPost, Root+"containers/"+id+"/"+verb, in, out)
}

// Save is Service.Save.
func (c *Client) Save(ctx context.Context, id, name string) (string, error) {
	var a saveAnswer
	err := c.on(ctx, id, "snapshots", saveRequest{name}, &a)
	return a.Name, err
}

// Pause is Service.Pause.
func (c *Client) Pause(ctx context.Context, id string) error {
	return c.on(ctx, id, "pause", nothing{}, nil)
}

// Resume is Service.Resume.
func (c *Client) Resume(ctx context.Context, id string) (note string, err error) {
	var a resumeAnswer
	err = c.on(ctx, id, "resume", nothing{}, &a)
	return a.Note, err
}

// Rollback is Service.Rollback.
func (c *Client) Rollback(ctx context.Context, id, name string) error {
	return c.on(ctx, id, "rollback", rollbackRequest{name}, nil)
}

// Clone is Service.Clone.
func (c *Client) Clone(ctx context.Context, id string, n int) (ids []string, failed []error) {
	var a cloneAnswer
	if err := c.on(ctx, id, "clone", cloneRequest{&n}, &a); err != nil {
		return nil, []error{err}
	}
	for _, line := range a.Failed {
		failed = append(failed, errors.New(line))
	}
	return a.IDs, failed
}

// Snapshots is Service.Snapshots.
func (c *Client) Snapshots(ctx context.Context) (list []Snapshot, err error) {
	err = control.Ask(ctx, c.socket, http.MethodGet, Root+"snapshots", nil, &list)
	return list, err
}

// Snapshot is Service.Snapshot.
func (c *Client) Snapshot(ctx context.Context, name string) (s Snapshot, err error) {
	if err := validName(name); err != nil {
		return s, err
	}
	err = control.Ask(ctx, c.socket, http.MethodGet, Root+"snapshots/"+name, nil, &s)
	return s, err
}

// DeleteSnapshot is Service.DeleteSnapshot.
func (c *Client) DeleteSnapshot(ctx context.Context, name string) (usedBy []string, err error) {
	if err := validName(name); err != nil {
		return nil, err
	}
	var a deleteAnswer
	err = control.Ask(ctx, c.socket, http.MethodDelete, Root+"snapshots/"+name, nil, &a)
	return a.UsedBy, err
}

// Usage is Service.Usage.
func (c *Client) Usage(ctx context.Context) (u usage.Usage, err error) {
	err = control.Ask(ctx, c.socket, http.MethodGet, Root+"usage", nil, &u)
	return u, err
}

// Prune is Service.Prune.
func (c *Client) Prune(ctx context.Context, dryRun bool, keep *config.Retention) (usage.Freed, error) {
	var a pruneAnswer
	err := control.Send(ctx, c.socket, http.MethodPost, Root+"prune", pruneRequest{dryRun, keep}, &a)
	if a.Failed != "" {
		err = errors.New(a.Failed)
	}
	return a.Freed, err
}

func validName(name string) error { return snapshot.ValidID(name) }
