package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// syncEvery is how long an entry may be the kernel's alone: that of a host that loses its power just then is lost. What is
// recorded survives the end of the process at once.
const syncEvery = time.Second

// queue is how many entries may wait for their turn without who records them.
const queue = 64

// Log is an open record. Several processes may have the same one open. All methods may be called from many goroutines.
//
// An entry is written, by a single write, before Record returns, and synced to the disk within a second.
type Log struct {
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
	w := &writer{File: file}
	if err := w.open(); err != nil {
		return nil, err
	}
	l := &Log{log: log, entries: make(chan written, queue), quit: make(chan struct{}), ended: make(chan struct{})}
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
