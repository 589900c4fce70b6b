package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
)

// imageExt is the end of an image's name; the rest is the snapshot's id.
const imageExt = ".img"

// Remove forgets the snapshot. Its image is deleted in the background, by Cleanup at the latest.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	err := s.meta.WithTransaction(ctx, true, func(ctx context.Context) error {
		_, _, err := storage.Remove(ctx, key)
		return err
	})
	if err != nil {
		return s.fail("remove", key, err)
	}
	killpoint("forgotten")
	s.collector.kick()
	return nil
}

// Cleanup returns when every image of a removed snapshot is deleted.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	return s.collector.run(ctx)
}

// sweep removes what a killed snapshotter left, and tells of snapshots whose images are gone.
func (s *Snapshotter) sweep(ctx context.Context) error {
	left, err := os.ReadDir(s.tmp)
	if err != nil {
		return err
	}
	// First, since it fails where another snapshotter is at work, whose temporary files these would be.
	known, err := s.collect(ctx)
	if err != nil {
		return err
	}
	for _, e := range left {
		if err := os.Remove(filepath.Join(s.tmp, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for id, key := range known {
		r, err := s.lookup(ctx, key)
		if err != nil {
			return err
		}
		if _, err := os.Stat(s.path(id)); errors.Is(err, fs.ErrNotExist) && r.imageID() == id {
			s.log.Error("the image of a snapshot is gone: remove the container or image, and pull the image again", "snapshot", key, "image", s.path(id))
		}
	}
	return nil
}

// collect deletes the images that no snapshot has, and returns the keys of all snapshots by id.
func (s *Snapshotter) collect(ctx context.Context) (known map[string]string, err error) {
	var trash []string
	// In a writing transaction no snapshot is between its file's rename and its record, and so none is later by the
	// time the file has a name in tmp.
	err = s.meta.WithTransaction(ctx, true, func(ctx context.Context) error {
		known, err = storage.IDMap(ctx)
		if err != nil && !errdefs.IsNotFound(err) { // there were never any snapshots
			return err
		}
		files, err := os.ReadDir(s.images)
		if err != nil {
			return err
		}
		for _, f := range files {
			id, _ := strings.CutSuffix(f.Name(), imageExt)
			if _, ok := known[id]; ok {
				continue
			}
			gone := filepath.Join(s.tmp, "gone-"+f.Name())
			if err := os.Rename(filepath.Join(s.images, f.Name()), gone); err != nil {
				return err
			}
			trash = append(trash, gone)
		}
		return nil
	})
	errs := []error{err}
	for _, f := range trash {
		killpoint("trashed")
		errs = append(errs, os.Remove(f))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("delete images of removed snapshots: %w", err)
	}
	return known, nil
}

// collector is the one goroutine that deletes images.
type collector struct {
	requests chan chan<- error
	quit     func()
	done     chan struct{}
}

func startCollector(collect func(context.Context) (map[string]string, error), log *slog.Logger) *collector {
	ctx, cancel := context.WithCancel(context.Background())
	c := &collector{requests: make(chan chan<- error, 1), quit: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		for {
			select {
			case <-ctx.Done():
				return
			case reply := <-c.requests:
				_, err := collect(ctx)
				if reply != nil {
					reply <- err
				} else if err != nil {
					log.Warn("some images will be deleted later", "err", err)
				}
			}
		}
	}()
	return c
}

// kick asks for a collection without waiting. One that is asked for already will do.
func (c *collector) kick() {
	select {
	case c.requests <- nil:
	default:
	}
}

// run waits for a collection that starts from here on.
func (c *collector) run(ctx context.Context) error {
	reply := make(chan error, 1)
	select {
	case c.requests <- reply:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return errdefs.ErrUnavailable.WithMessage("the snapshotter is closed")
	}
	select {
	case err := <-reply:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return errdefs.ErrUnavailable.WithMessage("the snapshotter is closed")
	}
}

func (c *collector) stop() {
	c.quit()
	<-c.done
}
