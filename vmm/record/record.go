// Package record keeps, in a machine's directory, what the machine holds on the host. Each entry is written before the
// thing itself is acquired, so that after a kill -9 of its owner at any point Cleanup finds everything.
//
// The directory of all machines is locked: shared by whoever begins a record or cleans up after a machine known to be
// its own, exclusively by whoever removes a leftover, which is judged again under the lock. So what looked like a leftover
// a moment ago and is being made anew is left alone.
package record

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
)

const (
	// file is the record's name in the machine's directory.
	file = "vm.json"
	// cleanupTimeout bounds a clean-up: a killed QEMU is gone in milliseconds.
	cleanupTimeout = 2 * time.Second
)

// State is what a machine holds. Zero values are things not acquired yet.
type State struct {
	ID     string     `json:"id"`
	Owner  process.ID `json:"owner"` // the launching process
	QEMU   process.ID `json:"qemu"`
	UID    uint32     `json:"uid"`
	Cgroup string     `json:"cgroup"` // below cgroup.Parent
}

// Record is the record of a machine that this process is launching.
type Record struct {
	dir   string
	state State
}

// New starts the record of the machine in dir. It waits for a clean-up of leftovers under way: from the record on, the
// machine is nobody's leftover.
func New(ctx context.Context, dir, id string) (*Record, error) {
	self, err := process.Self()
	if err != nil {
		return nil, err
	}
	unlock, err := flock.LockDir(ctx, filepath.Dir(dir), true)
	if err != nil {
		return nil, fmt.Errorf("record the machine: %w", err)
	}
	defer unlock()
	r := &Record{dir: dir}
	return r, r.Update(func(s *State) { s.ID, s.Owner = id, self })
}

// Update changes the record. When it returns, the change is what Cleanup will see.
func (r *Record) Update(change func(*State)) error {
	change(&r.state)
	b, err := json.Marshal(r.state)
	if err != nil {
		return err
	}
	tmp := filepath.Join(r.dir, "."+file)
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("record the machine: %w", err)
	}
	if err := os.Rename(tmp, filepath.Join(r.dir, file)); err != nil {
		return fmt.Errorf("record the machine: %w", err)
	}
	return nil
}

// Read returns what is recorded in a machine's directory; fs.ErrNotExist when it holds nothing yet.
func Read(dir string) (State, error) {
	var s State
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("%s: %w", filepath.Join(dir, file), err)
	}
	return s, nil
}

// Cleanup ends what is left of the machine in dir and frees all that it held, dir included. It is for machines whose
// owner is gone (or about to be killed); it takes well below two seconds and may be repeated. A directory that doesn't
// exist is a machine that is gone.
func Cleanup(cfg *config.Config, dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(cleanupTimeout))
	defer cancel()
	unlock, err := flock.LockDir(ctx, filepath.Dir(dir), true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("clean up after a machine: %w", err)
	}
	defer unlock()
	return cleanup(ctx, cfg, dir)
}

// cleanup is Cleanup with the lock held.
func cleanup(ctx context.Context, cfg *config.Config, dir string) error {
	s, err := Read(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist): // nothing was acquired
	case err != nil:
		return fmt.Errorf("clean up after a machine: %w", err)
	default:
		if err := s.free(ctx, cfg, dir); err != nil {
			return fmt.Errorf("clean up after machine %s: %w", s.ID, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("clean up after a machine: %w", err)
	}
	return nil
}

// free goes on after an error, but reports it: what could be freed is free, and the record stays for another attempt.
func (s *State) free(ctx context.Context, cfg *config.Config, dir string) error {
	var errs []error
	errs = append(errs, s.QEMU.Kill(ctx))
	if s.Cgroup != "" {
		errs = append(errs, cgroup.Remove(ctx, s.Cgroup))
	}
	if err := errors.Join(errs...); err != nil {
		return err // the uid may still be in use
	}
	if s.UID != 0 {
		return jail.NewUIDs(cfg).Release(s.UID, dir)
	}
	return nil
}
