package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	shimrecord "github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// lockLimit bounds the wait for whoever starts or ends a pod's shim.
const lockLimit = 5 * time.Second

// forsaken says why nobody will ask for the snapshot: what it was made for is done, or is not going to be. "" for one that
// somebody may have a use for.
func forsaken(ctx context.Context, cfg *config.Config, info snapshot.Info) (string, error) {
	if info.Damage != "" {
		return "", nil // whoever knows its name is told
	}
	p, err := saved.Decode(info.Note)
	switch {
	case err != nil || p.Purpose == "":
		return "", nil
	case p.Purpose == saved.ForClone && sandbox.Cloning(cfg, info.ID):
		return "", nil
	case p.Purpose == saved.ForClone:
		return "whoever was making clones of it has died", nil
	}
	// In this order: a shim that ends after a pause has written the checkpoint before.
	lives, err := hasShim(ctx, cfg, p)
	if lives || err != nil {
		return "", err
	}
	named, err := isPaused(cfg, info.ID)
	if named || err != nil {
		return "", err
	}
	return fmt.Sprintf("no paused container goes on from it, nor does %s/%s run", p.Namespace, p.ID), nil
}

// hasShim tells whether the pod that was saved has a shim, which may be pausing it.
func hasShim(ctx context.Context, cfg *config.Config, p *saved.Pod) (bool, error) {
	all, err := shimrecord.Pods(cfg.PodDir())
	if err != nil {
		return false, err
	}
	for _, pod := range all {
		state, err := pod.State()
		if errors.Is(err, fs.ErrNotExist) || err == nil && (state.ID != p.ID || state.Namespace != p.Namespace) {
			continue
		}
		if err != nil {
			return false, err
		}
		lives, err := shimOf(ctx, cfg, pod)
		if lives || err != nil {
			return lives, err
		}
	}
	return false, nil
}

func shimOf(ctx context.Context, cfg *config.Config, pod shimrecord.Pod) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(lockLimit))
	defer cancel()
	unlock, err := pod.Lock(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unlock()
	shim, err := pod.Shim()
	return shim.PID != 0, err
}

// isPaused tells whether the checkpoint of a paused container names the snapshot.
func isPaused(cfg *config.Config, id string) (bool, error) {
	spaces, err := entries(cfg.PausedDir())
	if err != nil {
		return false, err
	}
	for _, ns := range spaces {
		containers, err := entries(filepath.Join(cfg.PausedDir(), ns.Name()))
		if err != nil {
			return false, err
		}
		for _, e := range containers {
			c, err := saved.ReadCheckpoint(filepath.Join(cfg.PausedDir(), ns.Name(), e.Name()))
			if errdefs.IsInvalidArgument(err) { // it is being made, or removed
				continue
			}
			if err != nil { // it may name any
				return false, err
			}
			if c.Snapshot == id {
				return true, nil
			}
		}
	}
	return false, nil
}
