package artefact

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/flock"
)

// useDir has a directory for each artefact, locked by those who use it. It is beside the artefacts, not in them: these are
// the roots of jails, and what is in a jail must not get at a lock.
const useDir = ".use"

var digestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Use keeps the artefact in dir from being removed until release is called or this process has ended. fs.ErrNotExist: it is
// gone.
func Use(ctx context.Context, dir string) (release func(), err error) {
	lock := lockOf(dir)
	for {
		err := os.MkdirAll(lock, 0o700)
		if errors.Is(err, unix.EROFS) { // where nobody can remove it
			_, err := os.Stat(dir)
			return func() {}, err
		}
		if err != nil {
			return nil, fmt.Errorf("use an artefact: %w", err)
		}
		if release, err = flock.LockDir(ctx, lock, true); err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) { // a Remove has taken it away
			return nil, fmt.Errorf("use an artefact: %w", err)
		}
	}
	if _, err := os.Stat(dir); err != nil {
		release()
		return nil, err
	}
	now := time.Now()
	_ = os.Chtimes(lock, now, now) // for the order in which artefacts are given up
	return release, nil
}

func lockOf(dir string) string { return filepath.Join(filepath.Dir(dir), useDir, filepath.Base(dir)) }

// Kept is a published artefact.
type Kept struct {
	Dir    string
	Digest string
	// Used is when it was published or last used.
	Used    time.Time
	Current bool
}

// List lists the artefacts below parent, least recently used first. There are none where parent isn't there.
func List(parent string) ([]Kept, error) {
	entries, err := os.ReadDir(parent)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the artefacts: %w", err)
	}
	current, _ := os.Readlink(filepath.Join(parent, Current))
	var all []Kept
	for _, e := range entries {
		if !e.IsDir() || !digestForm.MatchString(e.Name()) {
			continue
		}
		k := Kept{Dir: filepath.Join(parent, e.Name()), Digest: e.Name(), Current: e.Name() == current}
		for _, path := range []string{k.Dir, lockOf(k.Dir)} {
			if info, err := os.Stat(path); err == nil && info.ModTime().After(k.Used) {
				k.Used = info.ModTime()
			}
		}
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b Kept) int { return a.Used.Compare(b.Used) })
	return all, nil
}

// InUse tells whether anybody uses the artefact.
func (k Kept) InUse() bool {
	unlock, err := flock.TryLockDir(lockOf(k.Dir))
	if err == nil {
		unlock()
	}
	return errors.Is(err, flock.ErrLocked)
}

// Remove removes the artefact, unless it is current, in use, or needed, which is asked when nobody can begin to use it. It
// tells whether the artefact is gone.
func (k Kept) Remove(ctx context.Context, needed func() (bool, error)) (gone bool, err error) {
	parent := filepath.Dir(k.Dir)
	unlock, err := flock.Lock(ctx, filepath.Join(parent, lockFile)) // it doesn't become the current one meanwhile
	if err != nil {
		return false, fmt.Errorf("remove an artefact: %w", err)
	}
	defer unlock()
	if current, err := os.Readlink(filepath.Join(parent, Current)); err == nil && current == k.Digest {
		return false, nil
	}
	lock := lockOf(k.Dir)
	if err := os.MkdirAll(lock, 0o700); err != nil {
		return false, fmt.Errorf("remove an artefact: %w", err)
	}
	free, err := flock.TryLockDir(lock)
	if errors.Is(err, flock.ErrLocked) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("remove an artefact: %w", err)
	}
	defer free()
	if is, err := needed(); is || err != nil {
		return false, err
	}
	// Out of sight at once, since half an artefact is none; what a kill leaves is swept.
	grave := filepath.Join(parent, tmpPrefix+k.Digest)
	err = os.Rename(k.Dir, grave)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err := errors.Join(err, os.RemoveAll(grave), os.Remove(lock)); err != nil {
		return false, fmt.Errorf("remove an artefact: %w", err)
	}
	return true, nil
}
