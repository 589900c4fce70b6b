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
	m, mem, err := l.bootAgain(ctx, art, key.Accel, key.Shape)
	if err != nil {
		return err
	}
	defer mem.Close()
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return halt(m) })

	d := description{Key: key, TSCKHz: tscKHz}
	if d.State.Size, err = writeFile(filepath.Join(dir, stateFile), func(f *os.File) error {
		// QEMU takes a descriptor to write the state to only if it can do nothing else with it.
		w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer w.Close()
		ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout(saveTimeout))
		defer cancel()
		if err := m.SaveState(ctx, w); err != nil {
			return err
		}
		d.State.Digest, err = sha256Of(f)
		return err
	}); err != nil {
		return err
	}
	// The machine must be gone before its memory is final.
	if err := halt(m); err != nil {
		return err
	}
	if d.Memory.Size, err = writeFile(filepath.Join(dir, memoryFile), func(f *os.File) (err error) {
		d.Memory.Digests, err = memory.Copy(f, mem, int64(key.Shape.MemoryMiB)<<20)
		return err
	}); err != nil {
		return err
	}
	if _, err := writeFile(filepath.Join(dir, descFile), func(f *os.File) error {
		return json.NewEncoder(f).Encode(d)
	}); err != nil {
		return err
	}
	return syncDir(dir)
}

// writeFile makes a synced file and returns its size.
func writeFile(path string, fill func(*os.File) error) (size int64, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := fill(f); err != nil {
		return 0, fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), f.Sync()
}
