// Package artefact makes directories of files that are named by what is in them: QEMU with its libraries, the guest
// image. Such a directory appears whole or not at all and never changes; a symbolic link "current" beside it says which
// one is in use, and whoever uses another keeps it from being removed. The package knows nothing of virtual machines.
package artefact

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/undo"
)

// Current is the name of the symbolic link to the directory in use.
const Current = "current"

// tmpPrefix marks what is being made; what a kill leaves of it is swept by the next Publish.
const tmpPrefix = ".tmp-"

// lockFile is held by the one Publish of its directory.
const lockFile = ".lock"

// Publish has fill make the content of a new directory below parent, names it by its Digest, makes it the current one
// and returns its path. An intact directory of that digest is used again. One Publish per parent runs at a time. The others
// stay: who may need them isn't known here; see Remove.
func Publish(parent string, fill func(dir string) error) (_ string, err error) {
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", err
	}
	unlock, err := flock.Lock(context.Background(), filepath.Join(parent, lockFile))
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", parent, err)
	}
	defer unlock()
	if err := sweep(parent); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(parent, tmpPrefix)
	if err != nil {
		return "", err
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(tmp) })

	if err := fill(tmp); err != nil {
		return "", err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	digest, err := Digest(tmp)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(parent, digest)
	if Verify(dir) == nil {
		if err := os.RemoveAll(tmp); err != nil {
			return "", err
		}
	} else {
		// What can't be verified is missing or damaged; no machine of worth runs from it.
		if err := os.RemoveAll(dir); err != nil {
			return "", err
		}
		if err := syncTree(tmp); err != nil {
			return "", err
		}
		if err := os.Rename(tmp, dir); err != nil {
			return "", err
		}
	}
	if err := setCurrent(parent, digest); err != nil {
		return "", err
	}
	return dir, nil
}

// sweep removes what killed Publishes left behind.
func sweep(parent string) error {
	left, err := halfMade(parent)
	if err != nil {
		return err
	}
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("sweep a half-made artefact: %w", err)
		}
	}
	return nil
}

func halfMade(parent string) (left []string, err error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			left = append(left, filepath.Join(parent, e.Name()))
		}
	}
	return left, nil
}

// HalfMade lists what killed Publishes have left below parent; nothing while a Publish is under way or where parent isn't
// there.
func HalfMade(parent string) ([]string, error) {
	left, err := halfMade(parent)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(left) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for half-made artefacts: %w", err)
	}
	unlock, err := flock.TryLock(filepath.Join(parent, lockFile))
	if errors.Is(err, flock.ErrLocked) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unlock()
	return halfMade(parent)
}

// RemoveHalfMade removes them, unless a Publish is under way.
func RemoveHalfMade(parent string) error {
	unlock, err := flock.TryLock(filepath.Join(parent, lockFile))
	if errors.Is(err, flock.ErrLocked) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	return sweep(parent)
}

func setCurrent(parent, digest string) error {
	link := filepath.Join(parent, Current)
	if to, err := os.Readlink(link); err == nil && to == digest {
		return nil
	}
	tmp := filepath.Join(parent, tmpPrefix+Current)
	if err := os.Symlink(digest, tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, link); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return syncFile(parent)
}
