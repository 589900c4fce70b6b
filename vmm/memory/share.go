package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/process"
)

// Pool is a directory in which processes tell each other which sealed copies they hold, so that one copy of a memory
// serves the whole host without a daemon: whoever needs it opens it through /proc/<pid>/fd of a holder. Only root may
// write to the directory.
type Pool struct{ dir string }

// holder is the content of a file in <pool>/<key>/, which is named after it.
type holder struct {
	process.ID
	FD  int    `json:"fd"`
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

// NewPool returns the pool in dir, which need not exist.
func NewPool(dir string) *Pool { return &Pool{dir: dir} }

// Held is a sealed memory that this process holds, and offers to others until Release.
type Held struct {
	File *os.File
	// Copied tells that this process made the copy.
	Copied bool
	entry  string
}

// Release ends the holding. The memory lives on while anyone else has it open or mapped.
func (h *Held) Release() error {
	err := os.Remove(h.entry)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, h.File.Close())
}

// Hold returns the sealed memory of that key and size: another holder's, or what copy makes.
func (p *Pool) Hold(ctx context.Context, key string, size int64, copy func() (*os.File, error)) (_ *Held, err error) {
	dir := filepath.Join(p.dir, key)
	// One copy at a time: whoever comes second finds the first one's.
	unlock, err := lockDir(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("hold memory: %w", err)
	}
	defer unlock()
	h := &Held{File: p.find(dir, size)}
	if h.File == nil {
		h.Copied = true
		if h.File, err = copy(); err != nil {
			return nil, err
		}
		if err := isSealed(h.File, size); err != nil {
			return nil, errors.Join(fmt.Errorf("hold memory: the copy is not sealed: %w", err), h.File.Close())
		}
	}
	if h.entry, err = register(dir, h.File); err != nil {
		return nil, errors.Join(fmt.Errorf("hold memory: %w", err), h.File.Close())
	}
	return h, nil
}

// lockDir makes and locks a directory that a Sweep may remove.
func lockDir(ctx context.Context, dir string) (unlock func(), err error) {
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		unlock, err = flock.LockDir(ctx, dir, false)
		if !errors.Is(err, fs.ErrNotExist) {
			return unlock, err
		}
	}
}

// InUse tells whether any living process holds a memory whose key begins with prefix.
func (p *Pool) InUse(prefix string) bool {
	dirs, _ := filepath.Glob(filepath.Join(p.dir, prefix+"*"))
	for _, dir := range dirs {
		for _, h := range holders(dir) {
			if h.Alive() {
				return true
			}
		}
	}
	return false
}

// find opens a living holder's copy and forgets the holders that are gone.
func (p *Pool) find(dir string, size int64) *os.File {
	for entry, h := range holders(dir) {
		if !h.Alive() {
			_ = os.Remove(entry)
			continue
		}
		if f, err := h.open(size); err == nil {
			return f
		}
	}
	return nil
}

// holders reads all entries. One that can't be read is no holder.
func holders(dir string) map[string]holder {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	all := make(map[string]holder)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		path := filepath.Join(dir, e.Name())
		var h holder
		if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, &h) == nil {
			all[path] = h
		}
	}
	return all
}

// open opens the holder's file and makes sure that it is the one that was registered: the descriptor may be another's
// by now.
func (h holder) open(size int64) (*os.File, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", h.PID, h.FD))
	if err != nil {
		return nil, err
	}
	dev, ino, err := identity(f)
	if err == nil && (dev != h.Dev || ino != h.Ino) {
		err = errors.New("it is another file")
	}
	if err == nil {
		err = isSealed(f, size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func identity(f *os.File) (dev, ino uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, 0, err
	}
	return st.Dev, st.Ino, nil
}

func register(dir string, f *os.File) (entry string, err error) {
	h := holder{FD: int(f.Fd())}
	if h.ID, err = process.Self(); err != nil {
		return "", err
	}
	if h.Dev, h.Ino, err = identity(f); err != nil {
		return "", err
	}
	b, err := json.Marshal(h)
	if err != nil {
		return "", err
	}
	entry = filepath.Join(dir, fmt.Sprintf("%d.%d", h.PID, h.FD))
	tmp := filepath.Join(dir, "."+filepath.Base(entry))
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return "", err
	}
	return entry, os.Rename(tmp, entry)
}

// Sweep removes what is left in the directory of memories that nobody holds any more, but for those to be kept.
func (p *Pool) Sweep(keep func(key string) bool) error {
	keys, err := os.ReadDir(p.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("sweep memories: %w", err)
	}
	var errs []error
	for _, e := range keys {
		if keep(e.Name()) {
			continue
		}
		dir := filepath.Join(p.dir, e.Name())
		unlock, err := flock.TryLockDir(dir)
		if err != nil { // in use, or gone
			continue
		}
		if !p.InUse(e.Name()) {
			errs = append(errs, os.RemoveAll(dir))
		}
		unlock()
	}
	return errors.Join(errs...)
}
