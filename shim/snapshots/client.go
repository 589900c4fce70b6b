package snapshots

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/api"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/saved"
)

// Client asks the shim of one pod.
type Client struct {
	pod string // its id
	rpc *ttrpc.Client
	api api.SnapshotsService
}

// Dial connects to the shim of the pod with that id in a namespace of containerd's. The error is errdefs.ErrNotFound where
// there is none.
func Dial(ctx context.Context, cfg *config.Config, namespace, id string) (*Client, error) {
	p, err := find(cfg, namespace, id)
	if err != nil {
		return nil, err
	}
	address, err := p.Address()
	if err != nil {
		return nil, fmt.Errorf("find the shim of %s: %w", id, err)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", strings.TrimPrefix(address, "unix://"))
	if err != nil {
		return nil, fmt.Errorf("connect to the shim of %s: %w", id, err)
	}
	rpc := ttrpc.NewClient(conn)
	return &Client{pod: id, rpc: rpc, api: api.NewSnapshotsClient(rpc)}, nil
}

// find finds a pod by its id.
func find(cfg *config.Config, namespace, id string) (record.Pod, error) {
	is := func(p record.Pod) (bool, error) {
		state, err := p.State()
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return err == nil && state.ID == id && state.Namespace == namespace, err
	}
	// That of a container by itself is the one that its bundle names, where that is of the private containerd's.
	if p, err := record.Bundle(filepath.Join(cfg.BundleDir(), namespace, id)).Pod(); err == nil {
		if ok, err := is(p); ok && err == nil {
			return p, nil
		}
	}
	pods, err := record.Pods(cfg.PodDir())
	if err != nil {
		return "", err
	}
	for _, p := range pods {
		ok, err := is(p)
		if err != nil {
			return "", fmt.Errorf("look for the pod %s: %w", id, err)
		}
		if ok {
			return p, nil
		}
	}
	return "", errdefs.ErrNotFound.WithMessage(fmt.Sprintf("%s is not running: no pod of namespace %s has that id", id, namespace))
}

// Close ends the connection.
func (c *Client) Close() error { return c.rpc.Close() }

// native is the error of a call, of the class that the shim has told; errdefs.ErrUnavailable if the shim is there no more.
func (c *Client) native(err error) error {
	if errors.Is(err, ttrpc.ErrClosed) {
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the shim of %s has ended meanwhile", c.pod))
	}
	return errgrpc.ToNative(err)
}

// Save makes a snapshot of the pod and returns its name; "" has the shim make one.
func (c *Client) Save(ctx context.Context, name string, purpose saved.Purpose) (string, error) {
	r, err := c.api.Save(ctx, &api.SaveRequest{Snapshot: name, Purpose: string(purpose)})
	return r.GetSnapshot(), c.native(err)
}

// SaveDisks makes a snapshot of the pod's disks alone. like is as in snapshot.Store.SaveDisks.
func (c *Client) SaveDisks(ctx context.Context, name, like string) error {
	_, err := c.api.Save(ctx, &api.SaveRequest{Snapshot: name, DisksOnly: true, Like: like})
	return c.native(err)
}

// Pause saves a container to disk and ends it; see pod.PauseToDisk.
func (c *Client) Pause(ctx context.Context, id string, cold bool) error {
	_, err := c.api.Pause(ctx, &api.PauseRequest{Container: id, Cold: cold})
	return c.native(err)
}

// Stats tells what the pod's machine is of, and what it takes.
func (c *Client) Stats(ctx context.Context) (*api.StatsResponse, error) {
	r, err := c.api.Stats(ctx, &api.StatsRequest{})
	return r, c.native(err)
}

// Rollback puts the pod back to a snapshot of it, and returns the pid that its tasks have then.
func (c *Client) Rollback(ctx context.Context, name string) (pid int, err error) {
	r, err := c.api.Rollback(ctx, &api.RollbackRequest{Snapshot: name})
	return int(r.GetPid()), c.native(err)
}

// Hold has the pod's machine stand still; see pod.Hold.
func (c *Client) Hold(ctx context.Context) error {
	_, err := c.api.Hold(ctx, &api.HoldRequest{})
	return c.native(err)
}

// Release has it go on.
func (c *Client) Release(ctx context.Context) error {
	_, err := c.api.Release(ctx, &api.ReleaseRequest{})
	return c.native(err)
}
