// Package artefact makes directories of files that are named by what is in them: QEMU with its libraries, the guest
// image. Such a directory appears whole or not at all and never changes; a symbolic link "current" beside it says which
// one is in use. The package knows nothing of virtual machines.
package artefact

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/undo"
)

// Current is the name of the symbolic link to the directory in use.
const Current = "current"

// kept is how many directories besides the current one survive a Publish, newest first: a machine that is just being
// launched may still read the one that was current a moment ago.
const kept = 2

// tmpPrefix marks what is being made; what a kill leaves of it is swept by the next Publish.
const tmpPrefix = ".tmp-"

// Publish has fill make the content of a new directory below parent, names it by its Digest, makes it the current one
// and returns its path. An intact directory of that digest is used again. One Publish per parent runs at a time.
func Publish(parent string, fill func(dir string) error) (_ string, err error) {
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(parent)
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
	return dir, prune(parent, digest)
}

// lock keeps other Publishes of parent out until the returned function is called.
func lock(parent string) (func(), error) {
	f, err := os.OpenFile(filepath.Join(parent, ".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// sweep removes what killed Publishes left behind.
func sweep(parent string) error {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := os.RemoveAll(filepath.Join(parent, e.Name())); err != nil {
				return fmt.Errorf("sweep a half-made artefact: %w", err)
			}
		}
	}
	return nil
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

// prune removes all but the current directory and the newest others.
func prune(parent, current string) error {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	type candidate struct {
		name string
		time time.Time
	}
	var old []candidate
	for _, e := range entries {
		if !e.IsDir() || e.Name() == current {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		old = append(old, candidate{e.Name(), info.ModTime()})
	}
	slices.SortFunc(old, func(a, b candidate) int { return b.time.Compare(a.time) })
	for _, c := range old[min(kept, len(old)):] {
		if err := os.RemoveAll(filepath.Join(parent, c.name)); err != nil {
			return fmt.Errorf("remove an old artefact: %w", err)
		}
	}
	return nil
}
