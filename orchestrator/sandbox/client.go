// Package sandbox makes and handles the containers of this machine through containerd: each is a container and task of
// the Cube runtime like any other, so that ctr and whoever else talks to containerd sees the same. It keeps no state
// of its own.
package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/snapshotter"
)

const (
	// Runtime is what containerd calls Cube's shim.
	Runtime = "io.cube.v2"
	// Snapshotter is what containerd calls Cube's snapshotter.
	Snapshotter = snapshotter.Name
)

// cleanupTimeout bounds killing and removing a container, which goes on after the caller's context has ended.
const cleanupTimeout = 30 * time.Second

// patience is longer than the start of a shim takes.
const patience = 2 * time.Second

// Client is a connection to the stack's containerd.
type Client struct {
	cfg  *config.Config
	ctrd *client.Client
}

// Connect connects to the stack's containerd, which must be running.
func Connect(ctx context.Context, cfg *config.Config) (*Client, error) {
	address := cfg.ContainerdSocket()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", address)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("no containerd answers at %s: start the stack with `cube up -d`", address)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("no access to containerd at %s: use sudo", address)
	case err != nil:
		return nil, fmt.Errorf("connect to containerd at %s: %w", address, err)
	}
	conn.Close()
	// Where the library mounts a fresh disk to look users up; `cube down` unmounts what a kill leaves there.
	if err := mount.SetTempMountLocation(MountDir(cfg)); err != nil {
		return nil, fmt.Errorf("make the directory for mounts: %w", err)
	}
	c, err := client.New(address, client.WithDefaultNamespace(cfg.Containerd.Namespace), client.WithDefaultRuntime(Runtime),
		client.WithExtraDialOpts([]grpc.DialOption{grpc.WithChainUnaryInterceptor(nameTheGone(address))}))
	if err != nil {
		return nil, fmt.Errorf("connect to containerd at %s: %w", address, err)
	}
	return &Client{cfg: cfg, ctrd: c}, nil
}

// nameTheGone has the error of a call for which there is no connection, or none any more, say to whom.
func nameTheGone(address string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		var header, trailer metadata.MD // what comes with any answer, also with a refusal
		err := invoke(ctx, method, req, reply, conn, append(opts, grpc.Header(&header), grpc.Trailer(&trailer))...)
		if status.Code(err) == codes.Unavailable && len(header) == 0 && len(trailer) == 0 {
			return status.Errorf(codes.Unavailable, "containerd at %s has gone: %s", address, status.Convert(err).Message())
		}
		return err
	}
}

// Close ends the connection.
func (c *Client) Close() error { return c.ctrd.Close() }

// context is ctx with the configured namespace, which calls that bypass the client's helpers need.
func (c *Client) context(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, c.cfg.Containerd.Namespace)
}

// cleanup is a context for undoing things: it goes on after ctx has ended, for a bounded time.
func (c *Client) cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), c.cfg.Timeout(cleanupTimeout))
}

// patient is a context that ends a little later than ctx does. containerd kills what starts a shim when the request for it
// is given up, and only a request that has got further is undone by everyone concerned.
func (c *Client) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	patient, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(c.cfg.Timeout(patience))
		defer timer.Stop()
		select {
		case <-timer.C:
			cancel()
		case <-patient.Done():
		}
	})
	return patient, func() { stop(); cancel() }
}

// container finds one of this runtime's containers.
func (c *Client) container(ctx context.Context, id string) (client.Container, error) {
	ctr, err := c.ctrd.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("no container %s in namespace %s: `cube ps -a` lists them", id, c.cfg.Containerd.Namespace))
	}
	if err != nil {
		return nil, fmt.Errorf("look up container %s: %w", id, err)
	}
	info, err := ctr.Info(ctx, client.WithoutRefreshedMetadata)
	if err != nil {
		return nil, fmt.Errorf("look up container %s: %w", id, err)
	}
	if info.Runtime.Name != Runtime {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is of runtime %s, not %s: use ctr for it", id, info.Runtime.Name, Runtime))
	}
	return ctr, nil
}

// runningTask finds the running task of a container.
func (c *Client) runningTask(ctx context.Context, id string) (client.Container, client.Task, error) {
	ctr, err := c.container(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	task, err := ctr.Task(ctx, nil)
	if errdefs.IsNotFound(err) && c.isPaused(ctx, id) {
		return nil, nil, errPaused(id)
	}
	if errdefs.IsNotFound(err) {
		return nil, nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s isn't running", id))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("look up the task of container %s: %w", id, err)
	}
	st, err := task.Status(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("look up the task of container %s: %w", id, err)
	}
	if st.Status == client.Stopped && c.isPaused(ctx, id) {
		return nil, nil, errPaused(id)
	}
	if st.Status != client.Running {
		return nil, nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s isn't running but %s", id, st.Status))
	}
	return ctr, task, nil
}

// Await waits for a containerd that has gone to come back. It is nothing to do when none has.
func (c *Client) Await(ctx context.Context) error {
	conn, ok := c.ctrd.Conn().(*grpc.ClientConn)
	if !ok {
		return errors.New("not a gRPC connection")
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout(time.Duration(c.cfg.ReadyTimeout)))
	defer cancel()
	conn.ResetConnectBackoff()
	for {
		conn.Connect()
		state := conn.GetState()
		if state == connectivity.Ready {
			return nil
		}
		if !conn.WaitForStateChange(ctx, state) {
			return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("containerd at %s has gone: %v", c.cfg.ContainerdSocket(), ctx.Err()))
		}
	}
}

// fifoDir is where the pipes of attached processes are.
func (c *Client) fifoDir() string { return filepath.Join(c.cfg.RunDir, "fifo") }

// MountDir is where disks are mounted for a moment.
func MountDir(cfg *config.Config) string { return filepath.Join(cfg.RunDir, "mounts") }

// randomID is a fresh id of 12 hexadecimal digits, as short as people know container ids.
func randomID() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
