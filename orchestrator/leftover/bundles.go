package leftover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/stack"
	shimrecord "github.com/cubesandbox/cube/shim/record"
)

// shimBinary is the shim's name as a program.
const shimBinary = "containerd-shim-cube-v2"

// bundles finds what the private containerd has left of tasks that it doesn't have any more: their ids can't be used again.
func bundles(ctx context.Context, s *search) ([]Leftover, error) {
	if s.cfg.Containerd.Address != "" {
		return nil, nil // where an existing one keeps them is its own business
	}
	dirs, _ := filepath.Glob(filepath.Join(s.cfg.BundleDir(), "*", "*")) // the pattern is well-formed
	var found []Leftover
	var errs []error
	for _, dir := range dirs {
		ref := sandbox.Ref{Namespace: filepath.Base(filepath.Dir(dir)), ID: filepath.Base(dir)}
		_, task := s.inv.Tasks[ref]
		info, err := os.Stat(dir)
		if task || err != nil || !s.old(info.ModTime()) || !ours(dir) {
			continue
		}
		alive, err := hasShim(ctx, s, shimrecord.Bundle(dir))
		errs = append(errs, err)
		if alive || err != nil {
			continue
		}
		found = append(found, Leftover{
			Name:   dir,
			Detail: fmt.Sprintf("containerd has no task %s, and its shim is gone", ref),
			Since:  info.ModTime(),
			Remedy: "undoes what the container had, runs its poststop hooks, and removes it",
			remove: func(ctx context.Context) error { return removeBundle(ctx, s, ref, dir) },
		})
	}
	return found, errors.Join(errs...)
}

// ours says whether a bundle is of this runtime.
func ours(bundle string) bool {
	b, err := os.ReadFile(filepath.Join(bundle, "shim-binary-path"))
	return err == nil && filepath.Base(strings.TrimSpace(string(b))) == shimBinary
}

// hasShim says whether the shim of a bundle's pod lives.
func hasShim(ctx context.Context, s *search, b shimrecord.Bundle) (bool, error) {
	p, err := b.Pod()
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	i, _, err := inspect(ctx, s, p)
	return i.shim.PID != 0, err
}

// removeBundle does what containerd does with the bundle of a task whose shim has died.
func removeBundle(ctx context.Context, s *search, ref sandbox.Ref, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(stopLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, s.cfg.Bin(shimBinary), "-namespace", ref.Namespace, "-address", s.cfg.ContainerdSocket(), "-id", ref.ID, "-bundle", dir, "delete")
	cmd.Dir = dir
	var warnings bytes.Buffer
	cmd.Stderr = &warnings
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("undo container %s: %w: %s", ref, err, strings.TrimSpace(warnings.String()))
	}
	if warnings.Len() > 0 { // what it couldn't undo
		return fmt.Errorf("undo container %s: %s", ref, strings.TrimSpace(warnings.String()))
	}
	if err := stack.UnmountBelow(dir); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(dir), os.RemoveAll(filepath.Join(s.cfg.StateDir, "containerd", filepath.Base(s.cfg.BundleDir()), ref.Namespace, ref.ID)))
}
