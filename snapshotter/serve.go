package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	diffapi "github.com/containerd/containerd/api/services/diff/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/diffservice"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/snapshotter/differ"
)

// stopWait is how long calls under way may take to end when the server stops.
const stopWait = 5 * time.Second

// Serve runs the snapshotter and the diff service on cfg.SnapshotterSocket(), which only root can use, until ctx ends;
// it then returns nil. It calls ready once it answers. Before it makes a disk it calls room, whose error, if any, is why not.
// cfg.StoreDir() must be there (see package store).
func Serve(ctx context.Context, cfg *config.Config, log *slog.Logger, room func(context.Context) error, ready func()) (err error) {
	s, err := New(cfg, log)
	if err != nil {
		return err
	}
	s.room = room
	defer func() { err = errors.Join(err, s.Close()) }()
	l, err := listen(ctx, cfg.SnapshotterSocket())
	if err != nil {
		return fmt.Errorf("serve snapshotter: %w", err)
	}
	srv := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(srv, snapshotservice.FromSnapshotter(s))
	diffapi.RegisterDiffServer(srv, diffservice.FromApplierAndComparer(differ.Gate{}, differ.Gate{}))

	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	ready()
	select {
	case err := <-served:
		return fmt.Errorf("serve snapshotter: %w", err)
	case <-ctx.Done():
	}
	kill := time.AfterFunc(cfg.Timeout(stopWait), srv.Stop)
	defer kill.Stop()
	srv.GracefulStop() // closes l, which removes the socket
	<-served
	return nil
}

// listen makes the socket, instead of one that nobody answers.
func listen(ctx context.Context, path string) (net.Listener, error) {
	var d net.Dialer
	if c, err := d.DialContext(ctx, "unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("another process answers on %s: stop it first (cube down), or set another run_dir", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// A socket's file gets its mode from the descriptor when it is bound, so that it is never open to others.
		var err error
		if ctlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); ctlErr != nil {
			return ctlErr
		}
		return err
	}}
	return lc.Listen(ctx, "unix", path)
}
