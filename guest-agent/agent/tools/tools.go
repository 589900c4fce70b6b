// Package tools has the programs of the guest image that are there for containers, not for the guest: envd.
package tools

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/disks"
	"github.com/cubesandbox/cube/guest-agent/agent/modules"
)

// Tools are on the disk of the kernel's modules, in a directory of their own. It is mounted when the first container asks
// for it.
type Tools struct {
	// Dir is where the disk is mounted.
	Dir string

	turn    sync.Mutex // of whoever mounts or unmounts it
	mounted bool
}

// subdir has the programs.
const subdir = "tools"

// Path returns the directory with the programs, which nobody can write to.
func (t *Tools) Path(ctx context.Context) (string, error) {
	t.turn.Lock()
	defer t.turn.Unlock()
	path := filepath.Join(t.Dir, subdir)
	if t.mounted {
		return path, nil
	}
	node, err := disks.Find(ctx, modules.Serial)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(t.Dir, 0o700); err != nil {
		return "", err
	}
	if err := unix.Mount(node, t.Dir, "ext4", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		return "", fmt.Errorf("mount the disk with the tools: %w", err)
	}
	if _, err := os.Stat(path); err != nil {
		return "", errors.Join(fmt.Errorf("the guest image has no tools for containers: %w", err), unix.Unmount(t.Dir, 0))
	}
	t.mounted = true
	return path, nil
}

// Unmount unmounts the disk, which no container may use any more.
func (t *Tools) Unmount() error {
	t.turn.Lock()
	defer t.turn.Unlock()
	if !t.mounted {
		return nil
	}
	if err := unix.Unmount(t.Dir, 0); err != nil {
		return fmt.Errorf("unmount the disk with the tools: %w", err)
	}
	t.mounted = false
	return nil
}
