package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
)

// Logs copies what a detached container has written, and with follow what it writes until it ends.
func (c *Client) Logs(ctx context.Context, id string, follow bool, w io.Writer) error {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return err
	}
	f, err := os.Open(LogPath(c.cfg, id))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("container %s has no log: only what `cube run -d` starts writes one", id)
	}
	if err != nil {
		return fmt.Errorf("read the log of container %s: %w", id, err)
	}
	defer f.Close()
	if !follow {
		return copyLog(w, f, id)
	}

	ended := make(chan struct{})
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
	return followFile(ctx, w, f, id, ended)
}

// followFile copies what is in the file and what comes to it, until ended is closed; then what is left.
func followFile(ctx context.Context, w io.Writer, f *os.File, id string, ended <-chan struct{}) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch the log of container %s: %w", id, err)
	}
	defer watcher.Close()
	if err := watcher.Add(f.Name()); err != nil {
		return fmt.Errorf("watch the log of container %s: %w", id, err)
	}
	for {
		if err := copyLog(w, f, id); err != nil {
			return err
		}
		select {
		case <-watcher.Events:
		case err := <-watcher.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) { // some events were lost, but one is enough
				return fmt.Errorf("watch the log of container %s: %w", id, err)
			}
		case <-ended:
			return copyLog(w, f, id)
		case <-ctx.Done():
			return nil // the reader has seen enough
		}
	}
}

func copyLog(w io.Writer, f *os.File, id string) error {
	if _, err := io.Copy(w, f); err != nil {
		return fmt.Errorf("copy the log of container %s: %w", id, err)
	}
	return nil
}
