package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// What makes something on the server isn't given up when ctx ends, for it to be known what there is to be removed.

// create makes a sandbox.
func (r *run) create(ctx context.Context) (*client.Guest, error) {
	g, err := r.api.Create(context.WithoutCancel(ctx), client.Create{
		TemplateID: r.Template, Timeout: int(life / time.Second), Secure: true, Metadata: map[string]string{mark: r.id},
	})
	if err != nil {
		return nil, err
	}
	r.note(r.boxes, g.ID, true)
	return g, r.answers(ctx, g)
}

// answers waits for envd, if that is what a sandbox is measured by.
func (r *run) answers(ctx context.Context, g *client.Guest) error {
	if r.Answered {
		return nil
	}
	return g.Answers(ctx)
}

func (r *run) snapshot(ctx context.Context, g *client.Guest, s *sample) {
	whole := context.WithoutCancel(ctx)
	var id string
	err := s.measure(func() (err error) {
		id, err = r.api.Snapshot(whole, g.ID)
		return err
	})
	if err != nil {
		return
	}
	r.note(r.snapshots, id, true)
	if r.api.DeleteTemplate(whole, id) == nil { // otherwise the end tries again, and tells
		r.note(r.snapshots, id, false)
	}
}

func (r *run) fork(ctx context.Context, g *client.Guest, s *sample) {
	var child *client.Guest
	err := s.measure(func() (err error) {
		if child, err = r.api.Fork(context.WithoutCancel(ctx), g.ID, life); err != nil {
			return err
		}
		r.note(r.boxes, child.ID, true)
		return r.answers(ctx, child)
	})
	if err == nil {
		_ = r.kill(ctx, child.ID) // otherwise the end tries again, and tells
	}
}

// kill removes a sandbox.
func (r *run) kill(ctx context.Context, id string) error {
	err := r.api.Kill(context.WithoutCancel(ctx), id)
	if err == nil || errdefs.IsNotFound(err) {
		r.note(r.boxes, id, false)
	}
	return err
}

func (r *run) killAll(ctx context.Context, guests []*client.Guest) {
	var all sync.WaitGroup
	for _, g := range guests {
		all.Go(func() { _ = r.kill(ctx, g.ID) }) // otherwise the end tries again, and tells
	}
	all.Wait()
}

// note notes that something is there, or isn't any more.
func (r *run) note(of map[string]bool, id string, there bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if there {
		of[id] = true
	} else {
		delete(of, id)
	}
}

// cleanTimeout bounds how long the end of a run takes.
const cleanTimeout = 2 * time.Minute

// clean removes what there still is of the run, also what was made for a request whose answer didn't come.
func (r *run) clean(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	marked, err := r.api.Marked(ctx, mark, r.id)
	errs := []error{err}
	for _, id := range marked {
		r.note(r.boxes, id, true)
	}
	var all sync.WaitGroup
	for id := range maps.Clone(r.boxes) {
		all.Go(func() { _ = r.kill(ctx, id) }) // what is left is told of
	}
	all.Wait()
	for id := range maps.Clone(r.snapshots) {
		if err := r.api.DeleteTemplate(ctx, id); err == nil || errdefs.IsNotFound(err) {
			r.note(r.snapshots, id, false)
		}
	}
	for what, left := range map[string]map[string]bool{"sandboxes": r.boxes, "snapshots": r.snapshots} {
		if len(left) > 0 {
			errs = append(errs, fmt.Errorf("%s couldn't be removed, and are left: %s", what, strings.Join(slices.Sorted(maps.Keys(left)), " ")))
		}
	}
	return errors.Join(errs...)
}
