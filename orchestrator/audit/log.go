package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// syncEvery is how long an entry may be the kernel's alone: that of a host that loses its power just then is lost. What is
// recorded survives the end of the process at once.
const syncEvery = time.Second

// queue is how many entries may wait for their turn without who records them.
const queue = 64

// File is where a record is, and what is kept of it: PATH is the newest, PATH.1 what was before, and so on.
type File struct {
	Path string
	// Size is how large, in bytes, one file gets, and Files how many there are, the newest included; the oldest goes.
	Size  int64
	Files int
}

// Log is an open record. Several processes may have the same one open. All methods may be called from many goroutines.
//
// An entry is written, by a single write, before Record returns, and synced to the disk within a second.
type Log struct {
	file    File
	log     *slog.Logger
	entries chan written
	quit    chan struct{}
	ended   chan struct{}

	mu   sync.Mutex
	lost int // entries that couldn't be written, and of which the record doesn't say so yet
}

// written is an entry on its way.
type written struct {
	line []byte
	done chan error
}

// Open opens a record, or begins one. That it can't be written is an error at once.
func Open(file File, log *slog.Logger) (*Log, error) {
	l := &Log{file: file, log: log, entries: make(chan written, queue), quit: make(chan struct{}), ended: make(chan struct{})}
	if err := os.MkdirAll(filepath.Dir(file.Path), 0o700); err != nil {
		return nil, fmt.Errorf("the audit log: %w", err)
	}
	w := &writer{File: file}
	if err := w.open(); err != nil {
		return nil, err
	}
	go l.run(w)
	return l, nil
}

// Close has all that was recorded be on the disk. Nothing can be recorded any more.
func (l *Log) Close() error {
	close(l.quit)
	<-l.ended
	return nil
}

// Record writes an entry; what can't be written is in the daemon's log, and Ready says so.
func (l *Log) Record(e Entry) {
	line, err := encode(e)
	if err == nil {
		err = l.write(line)
	}
	if err != nil {
		l.mu.Lock()
		l.lost++
		l.mu.Unlock()
		l.log.Error("what was done can't be written to the audit log", "error", err, "entry", string(bytes.TrimSpace(line)))
	}
}

// Ready is nil if entries can be written. After one that couldn't, it writes that there is a gap, or tells why that can't be.
func (l *Log) Ready() error {
	l.mu.Lock()
	lost := l.lost
	l.mu.Unlock()
	if lost == 0 {
		return nil
	}
	line, err := encode(Entry{Action: Gap, Result: OK, By: By{Via: Host}, Why: fmt.Sprintf("up to %d entries before this one couldn't be written: the daemon's log has them", lost)})
	if err == nil {
		err = l.write(line)
	}
	if err != nil {
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("nothing is made while it can't be recorded: %v", err))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = max(l.lost-lost, 0)
	return nil
}

// write has a line be written when its turn comes.
func (l *Log) write(line []byte) error {
	w := written{line, make(chan error, 1)}
	select {
	case l.entries <- w:
	case <-l.ended:
		return errClosed
	}
	select {
	case err := <-w.done:
		return err
	case <-l.ended:
		select {
		case err := <-w.done:
			return err
		default:
			return errClosed
		}
	}
}

var errClosed = errors.New("it is closed")

// encode is an entry's line, of now unless it has a time.
func encode(e Entry) ([]byte, error) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC().Round(time.Microsecond)
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(e)
	return b.Bytes(), err
}

// run writes what comes, all that waits by one write, and syncs it.
func (l *Log) run(w *writer) {
	defer close(l.ended)
	defer w.close()
	dirty := time.NewTimer(syncEvery)
	armed := true
	for {
		select {
		case first := <-l.entries:
			l.writeAll(w, first)
			if !armed {
				dirty.Reset(syncEvery)
				armed = true
			}
		case <-dirty.C:
			armed = false
			if err := w.sync(); err != nil {
				l.log.Error("the audit log can't be synced", "error", err)
			}
		case <-l.quit:
			for {
				select {
				case e := <-l.entries:
					l.writeAll(w, e)
					continue
				default:
				}
				break
			}
			if err := w.sync(); err != nil {
				l.log.Error("the audit log can't be synced", "error", err)
			}
			return
		}
	}
}

func (l *Log) writeAll(w *writer, first written) {
	all := []written{first}
	lines := first.line
	for len(all) < queue {
		select {
		case next := <-l.entries:
			all = append(all, next)
			lines = append(lines[:len(lines):len(lines)], next.line...)
			continue
		default:
		}
		break
	}
	err := w.write(lines)
	for _, e := range all {
		e.done <- err
	}
}

// Append adds an entry to a record by itself: it is on the disk when it returns.
func Append(file File, e Entry) error {
	line, err := encode(e)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file.Path), 0o700); err != nil {
		return fmt.Errorf("the audit log: %w", err)
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
	w.f, err = os.OpenFile(w.Path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
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
