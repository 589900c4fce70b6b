package saved

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
)

// Paused is the directory that a container of containerd's has while it is paused to disk: with the checkpoint that it goes
// on from. A container that has one, and no task that runs, is paused; its task's exit was no death.
type Paused string

// PausedOf is that of one container, which may not be paused.
func PausedOf(cfg *config.Config, namespace, id string) Paused {
	return Paused(filepath.Join(cfg.PausedDir(), namespace, id))
}

// Checkpoint is what the container goes on from. The error is errdefs.ErrNotFound if it isn't paused.
func (p Paused) Checkpoint() (Checkpoint, error) {
	_, err := os.Lstat(filepath.Join(string(p), checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Checkpoint{}, errdefs.ErrNotFound.WithMessage("container " + filepath.Base(string(p)) + " is not paused to disk")
	}
	if err != nil {
		return Checkpoint{}, err
	}
	return ReadCheckpoint(string(p))
}

// Write makes c the checkpoint, for good when it returns. The lock is held.
func (p Paused) Write(c Checkpoint) error {
	if err := c.Write(string(p)); err != nil {
		return err
	}
	// Each of the directories above may have been made for this one: namespace, all paused, state.
	for dir, n := filepath.Dir(string(p)), 0; n < 3; dir, n = filepath.Dir(dir), n+1 {
		if err := syncDir(dir); err != nil {
			return fmt.Errorf("write the checkpoint: %w", err)
		}
	}
	return nil
}

// Lock makes the directory, if need be, and keeps others from pausing the container, having it go on or removing it.
func (p Paused) Lock(ctx context.Context) (unlock func(), err error) {
	for {
		err := os.MkdirAll(string(p), 0o700)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("make the directory of a paused container: %w", err)
		}
		unlock, there, err := p.LockExisting(ctx)
		if there || err != nil {
			return unlock, err
		}
		// Somebody has unlocked it meanwhile.
	}
}

// LockExisting is Lock for who has nothing to write there: it makes nothing, so it needs no space. there is false, and nothing
// is locked, for a container that has no directory: it isn't paused, and nobody has begun to pause it or to have it go on.
func (p Paused) LockExisting(ctx context.Context) (unlock func(), there bool, err error) {
	release, err := flock.LockDir(ctx, string(p), false)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("container %s is being paused or resumed: %w", filepath.Base(string(p)), err)
	}
	return p.unlock(release), true, nil
}

// unlock leaves no directory behind that has no checkpoint.
func (p Paused) unlock(release func()) func() {
	return func() {
		_ = os.Remove(filepath.Join(string(p), checkpointFile) + unfinished) // of a pause that was killed
		if os.Remove(string(p)) == nil {
			_ = os.Remove(filepath.Dir(string(p))) // nor has any other container of the namespace a directory
		}
		release()
	}
}

// TryLock is Lock for who has nothing to do but with a container that others leave alone. locked is false if they don't.
func (p Paused) TryLock() (unlock func(), locked bool, err error) {
	release, err := flock.TryLockDir(string(p))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return func() {}, true, nil // nobody is about to pause it, or they will see what is there
	case errors.Is(err, flock.ErrLocked):
		return nil, false, nil
	case err != nil:
		return nil, false, err
	}
	return p.unlock(release), true, nil
}

// End removes the checkpoint, if it names that snapshot: the container runs, or is to be removed. Idempotent.
func (p Paused) End(snapshot string) error {
	c, err := p.Checkpoint()
	if errdefs.IsNotFound(err) || err == nil && c.Snapshot != snapshot {
		return nil
	}
	if err != nil {
		return err
	}
	return p.Forget()
}

// Forget removes the checkpoint, whatever is in it.
func (p Paused) Forget() error {
	err := os.Remove(filepath.Join(string(p), checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove the checkpoint of a paused container: %w", err)
	}
	return syncDir(string(p))
}
