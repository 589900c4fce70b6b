package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
)

// LogOptions say what of a log is wanted.
type LogOptions struct {
	// Follow goes on until the container ends.
	Follow bool
	// Tail is how many of the last lines so far are shown; negative: all.
	Tail int
}

// Logs copies what a detached container has written, as it was written.
func (c *Client) Logs(ctx context.Context, id string, o LogOptions, w io.Writer) error {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return err
	}
	var ended chan struct{} // nil: don't wait for it
	if o.Follow {
		ended = make(chan struct{})
		task, err := ctr.Task(ctx, nil)
		switch {
		case errdefs.IsNotFound(err):
			close(ended)
		case err != nil:
			return fmt.Errorf("look up the task of container %s: %w", id, err)
		default:
			exit, err := task.Wait(ctx)
			if err != nil {
				return fmt.Errorf("wait for container %s: %w", id, err)
			}
			go func() { <-exit; close(ended) }()
		}
	}
	err = CopyLog(ctx, w, LogPath(c.cfg, id), LogStart{Tail: o.Tail}, ended)
	if errors.Is(err, ErrNoLog) {
		return fmt.Errorf("container %s has no log: only what `cube run -d` starts writes one", id)
	}
	if err != nil {
		return fmt.Errorf("read the log of container %s: %w", id, err)
	}
	return nil
}

// ErrNoLog says that a container writes no log.
var ErrNoLog = errors.New("no log")

// CopyLog copies the log at LogPath from start on and, where ended isn't nil, what comes to it until ended is closed. That ctx ends
// is no error. A writer may be Placed.
func CopyLog(ctx context.Context, w io.Writer, path string, start LogStart, ended <-chan struct{}) error {
	var events <-chan fsnotify.Event
	var failures <-chan error
	if ended != nil {
		// The directory, not the file: it tells of the next file, too. What is written after this is noticed.
		watcher, err := fsnotify.NewWatcher()
		if err != nil {
			return err
		}
		defer watcher.Close()
		if err := watcher.Add(filepath.Dir(path)); err != nil {
			return err
		}
		events, failures = watcher.Events, watcher.Errors
	}
	r, err := openLog(path, start)
	if err != nil {
		return err
	}
	defer r.close()
	for {
		if err := r.copyTo(w); err != nil || ended == nil {
			return err
		}
		for waiting := true; waiting; {
			select {
			case e := <-events:
				waiting = e.Name != path // others write there, too
			case err := <-failures:
				if !errors.Is(err, fsnotify.ErrEventOverflow) { // some events were lost, maybe ours
					return err
				}
				waiting = false
			case <-ended:
				return r.copyTo(w)
			case <-ctx.Done():
				return nil // the reader has seen enough
			}
		}
	}
}

// logReader reads a log from file to file while it is being written and rotated.
type logReader struct {
	path string
	// files are what is to be read, oldest first. The last one may still grow.
	files []*os.File
}

// openLog opens the log where it is to be read first.
func openLog(path string, start LogStart) (*logReader, error) {
	files, err := openLogFiles(path, nil)
	if err != nil {
		return nil, err
	}
	r := &logReader{path: path, files: files}
	if len(files) == 0 {
		return nil, ErrNoLog
	}
	skip, err := start.seek(files)
	if err != nil {
		r.close()
		return nil, err
	}
	closeAll(files[:skip])
	r.files = files[skip:]
	return r, nil
}

// copyTo copies all that has been written by now.
func (r *logReader) copyTo(w io.Writer) error {
	for {
		f := r.files[0]
		if p, ok := w.(Placed); ok {
			at, err := placeOf(f)
			if err != nil {
				return err
			}
			p.Place(at)
		}
		if _, err := io.Copy(w, f); err != nil {
			return err
		}
		if len(r.files) == 1 {
			newer, err := r.newer(f)
			if err != nil || len(newer) == 0 {
				return err
			}
			r.files = append(r.files, newer...)
			continue // there may be more in f; what is newer was made after its last byte
		}
		f.Close()
		r.files = r.files[1:]
	}
}

// newer opens the files that have been made after f.
func (r *logReader) newer(f *os.File) ([]*os.File, error) {
	this, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if newest, err := os.Stat(r.path); err == nil && os.SameFile(this, newest) {
		return nil, nil
	}
	return openLogFiles(r.path, this)
}

func (r *logReader) close() { closeAll(r.files) }
