package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/cubesandbox/cube/internal/config"
)

// Running is the pid of the `cube up` that has this run directory, 0 when there is none. The process that runs the
// stack must not ask: see lock.
func Running(cfg *config.Config) (int, error) {
	f, err := os.OpenFile(lockPath(cfg), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("ask who holds the run directory: %w", err)
	}
	defer f.Close()
	return holder(f)
}

// Foreign is a socket of this stack on which someone listens although no `cube up` runs, "" when there is none.
func Foreign(ctx context.Context, cfg *config.Config) string {
	sockets := []string{cfg.ControlSocket(), cfg.SnapshotterSocket()}
	if cfg.Containerd.Address == "" {
		sockets = append(sockets, cfg.ContainerdSocket())
	}
	var d net.Dialer
	for _, s := range sockets {
		if c, err := d.DialContext(ctx, "unix", s); err == nil {
			c.Close()
			return s
		}
	}
	return ""
}

// Version is the version of the containerd that the stack uses, or why it can't be used.
func Version(ctx context.Context, cfg *config.Config) (string, error) {
	c, err := dial(cfg)
	if err != nil {
		return "", err
	}
	defer c.Close()
	v, err := c.Version(ctx)
	if err != nil {
		return "", fmt.Errorf("containerd at %s doesn't answer: %w", cfg.ContainerdSocket(), err)
	}
	if err := checkVersion(v.Version); err != nil {
		return "", fmt.Errorf("containerd at %s: %w", cfg.ContainerdSocket(), err)
	}
	return v.Version, nil
}
