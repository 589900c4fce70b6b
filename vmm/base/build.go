package base

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm/memory"
)

// saveTimeout is how long QEMU may take to write the state of its devices; it takes milliseconds.
const saveTimeout = 10 * time.Second

// build boots a machine and saves it into dir, synced.
func (l *Launcher) build(ctx context.Context, art artefacts, key Key, tscKHz int, dir string) (err error) {
	m, mem, err := l.boot(ctx, art, key.Accel, key.Shape)
	if err != nil {
		return err
	}
	defer mem.Close()
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return halt(m) })

	d := description{Key: key, TSCKHz: tscKHz}
	if d.State, err = writeFile(filepath.Join(dir, stateFile), func(f *os.File) (digest string, err error) {
		// QEMU takes a descriptor to write the state to only if it can do nothing else with it.
		w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
		if err != nil {
			return "", err
		}
		defer w.Close()
		ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout(saveTimeout))
		defer cancel()
		if err := m.SaveState(ctx, w); err != nil {
			return "", err
		}
		return sha256Of(f)
	}); err != nil {
		return err
	}
	// The machine must be gone before its memory is final.
	if err := halt(m); err != nil {
		return err
	}
	if d.Memory, err = writeFile(filepath.Join(dir, memoryFile), func(f *os.File) (digest string, err error) {
		return memory.Copy(f, mem, int64(key.Shape.MemoryMiB)<<20)
	}); err != nil {
		return err
	}
	if _, err := writeFile(filepath.Join(dir, descFile), func(f *os.File) (string, error) {
		return "", json.NewEncoder(f).Encode(d)
	}); err != nil {
		return err
	}
	return syncDir(dir)
}

// writeFile makes a synced file and describes it.
func writeFile(path string, fill func(*os.File) (digest string, err error)) (d fileOf, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return d, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if d.Digest, err = fill(f); err != nil {
		return d, fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	info, err := f.Stat()
	if err != nil {
		return d, err
	}
	d.Size = info.Size()
	return d, f.Sync()
}
