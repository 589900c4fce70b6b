package record

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cubesandbox/cube/internal/flock"
)

// MakeDisks makes an empty directory for a machine's disks. What is in its place is of a life of the host before, of which
// nothing else is left. The state that names the directory has been saved, and the caller has the pod's lock.
func MakeDisks(ctx context.Context, dir string) error {
	// Whoever sweeps may be at the old one, and is done with it before there is another.
	unlock, err := flock.LockDir(ctx, dir, false)
	if err == nil {
		defer unlock()
		err = os.RemoveAll(dir)
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return fmt.Errorf("make the directory of the machine's disks: %w", err)
	}
	return nil
}

// SweepDisks removes a directory of disks unless isStray, which is asked while nobody can put another in its place, says no.
// The error is flock.ErrLocked where somebody is about to.
func SweepDisks(dir string, isStray func() (bool, error)) (gone bool, err error) {
	unlock, err := flock.TryLockDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // somebody else has removed it
	}
	if err != nil {
		return false, fmt.Errorf("sweep disks: %w", err)
	}
	defer unlock()
	if stray, err := isStray(); !stray || err != nil {
		return false, err
	}
	if err := os.RemoveAll(dir); err != nil {
		return false, fmt.Errorf("sweep disks: %w", err)
	}
	return true, nil
}

// HasDisks tells whether the directory is that of a machine's disks.
func (s PodState) HasDisks(dir string) bool {
	return dir == s.DiskDir || s.Other != nil && dir == s.Other.DiskDir
}
