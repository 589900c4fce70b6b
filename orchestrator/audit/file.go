package audit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// File is where a record is, and what is kept of it: PATH is the newest, PATH.1 what was before, and so on.
type File struct {
	Path string
	// Size is how large, in bytes, one file gets, and Files how many there are, the newest included; the oldest goes.
	Size  int64
	Files int
}

// FileOf is the one of a stack.
func FileOf(cfg *config.Config) File {
	return File{Path: cfg.AuditFile(), Size: int64(cfg.Audit.MaxSize), Files: cfg.Audit.MaxFiles}
}

// Append adds an entry to a record by itself: it is on the disk when it returns.
func Append(file File, e Entry) error {
	line, err := encode(e)
	if err != nil {
		return err
	}
	w := &writer{File: file}
	if err := w.open(); err != nil {
		return err
	}
	defer w.close()
	if err := w.write(line); err != nil {
		return err
	}
	return w.sync()
}

// writer adds to the newest file. The lock on that file is whoever's who writes or renames it.
type writer struct {
	File
	f *os.File
}

func (w *writer) open() (err error) {
	err = os.MkdirAll(filepath.Dir(w.Path), 0o700)
	if err == nil {
		w.f, err = os.OpenFile(w.Path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	}
	if err == nil {
		err = w.f.Chmod(0o600)
	}
	if err != nil {
		w.close()
		return fmt.Errorf("the audit log: %w", err)
	}
	return nil
}

func (w *writer) close() {
	if w.f != nil {
		_ = w.f.Close() // it was synced, or that has failed
		w.f = nil
	}
}

func (w *writer) sync() error {
	if w.f == nil {
		return nil
	}
	return w.f.Sync()
}

// write adds lines, whole or not at all, to the newest file, or begins another one.
func (w *writer) write(lines []byte) error {
	for {
		if w.f == nil {
			if err := w.open(); err != nil {
				return err
			}
		}
		size, newest, err := w.lock()
		if err != nil {
			w.close()
			return fmt.Errorf("the audit log: %w", err)
		}
		switch {
		case !newest: // another process has begun another one
			w.close()
			continue
		case size > 0 && size+int64(len(lines)) > w.Size:
			err = errors.Join(w.f.Sync(), w.rotate())
			w.close()
			if err != nil {
				return fmt.Errorf("the audit log: %w", err)
			}
			continue
		}
		err = w.add(lines, size)
		if err != nil {
			w.close() // which gives up the lock, too
			return fmt.Errorf("the audit log: %w", err)
		}
		return nil
	}
}

// lock waits for the lock on the file, and tells how large it is and whether it is the newest one.
func (w *writer) lock() (size int64, newest bool, err error) {
	for err = unix.EINTR; err == unix.EINTR; {
		err = unix.Flock(int(w.f.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return 0, false, err
	}
	have, err := w.f.Stat()
	if err != nil {
		return 0, false, err
	}
	at, err := os.Stat(w.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	return have.Size(), err == nil && os.SameFile(have, at), err
}

// add writes lines behind the size that the file has, and gives up the lock. For what there is no space isn't there in part; what the
// end of the host has cut short is a line of its own.
func (w *writer) add(lines []byte, size int64) error {
	if size > 0 {
		var last [1]byte
		if _, err := w.f.ReadAt(last[:], size-1); err != nil {
			return err
		}
		if last[0] != '\n' {
			lines = append([]byte{'\n'}, lines...)
		}
	}
	if _, err := w.f.Write(lines); err != nil {
		return errors.Join(err, w.f.Truncate(size))
	}
	return unix.Flock(int(w.f.Fd()), unix.LOCK_UN)
}

// rotate renames all files, of which the oldest goes.
func (w *writer) rotate() error {
	for n := max(w.Files-1, 1); n > 0; n-- {
		err := os.Rename(w.numbered(n-1), w.numbered(n))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for n := max(w.Files, 1); ; n++ { // there may have been more of them once
		err := os.Remove(w.numbered(n))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return err
		}
	}
	dir, err := os.Open(filepath.Dir(w.Path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (w *writer) numbered(n int) string {
	if n == 0 {
		return w.Path
	}
	return fmt.Sprintf("%s.%d", w.Path, n)
}
