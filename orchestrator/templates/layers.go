package templates

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// Layers is where it is written down which disks of builds' steps are kept. What is there was made for its team alone, and is for no
// other: neither what is in it nor that it is there.
type Layers interface {
	BeginLayer(ctx context.Context, l db.Layer) error
	FinishLayer(ctx context.Context, snapshot string, bytes int64) error
	UseLayer(ctx context.Context, snapshot string) error
	Layer(ctx context.Context, team, sum string) (db.Layer, error)
	Layers(ctx context.Context) ([]db.Layer, error)
	DropLayer(ctx context.Context, snapshot string) error
}

// doomed, as a number of users, is one that is being removed.
const doomed = -1

// hold keeps a layer from being removed until release is called; false if it is being removed already.
func (b *Builder) hold(snapshot string) (release func() error, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.users[snapshot] == doomed {
		return nil, false
	}
	if b.users == nil {
		b.users = map[string]int{}
	}
	b.users[snapshot]++
	return func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.users[snapshot]--; b.users[snapshot] == 0 {
			delete(b.users, snapshot)
		}
		return nil
	}, true
}

// layer finds a layer and holds it. The error is errdefs.ErrNotFound where there is none.
func (b *Builder) layer(ctx context.Context, team, sum string) (snapshot string, release func() error, err error) {
	l, err := b.Layers.Layer(ctx, team, sum)
	if err != nil {
		return "", nil, err
	}
	release, ok := b.hold(l.Snapshot)
	if !ok {
		return "", nil, errdefs.ErrNotFound
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(release)
	has, err := b.Machines.Has(ctx, l.Snapshot)
	if err != nil {
		return "", nil, err
	}
	if !has { // somebody has removed it
		return "", nil, errors.Join(errdefs.ErrNotFound, b.Layers.DropLayer(ctx, l.Snapshot))
	}
	return l.Snapshot, release, b.Layers.UseLayer(ctx, l.Snapshot)
}

// addLayer holds a layer that save has made, by the name that it is given; save tells how many bytes it has that others haven't. After an
// error, too, release is to be called, and only when whatever saves it is gone: a machine may go on with that when nobody hears of it
// any more.
func (b *Builder) addLayer(ctx context.Context, team, sum string, save func(name string) (bytes int64, err error)) (snapshot string, release func() error, err error) {
	name := "layer-" + uuid.NewString()
	letGo, _ := b.hold(name)
	if err := b.Layers.BeginLayer(ctx, db.Layer{Snapshot: name, Team: team, Sum: sum}); err != nil {
		return "", letGo, err
	}
	bytes, err := save(name)
	if err == nil {
		err = b.Layers.FinishLayer(ctx, name, bytes)
	}
	if err != nil {
		return "", func() error { return errors.Join(b.removeLayer(ctx, name), letGo()) }, err
	}
	return name, func() error {
		err := letGo()
		b.trim(ctx)
		return err
	}, nil
}

// removeLayer gives back the disk, then forgets it. It goes on after ctx has ended.
func (b *Builder) removeLayer(ctx context.Context, snapshot string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Config.Timeout(undoTimeout))
	defer cancel()
	if err := b.Machines.Forget(ctx, snapshot); err != nil {
		return fmt.Errorf("remove the disk of a step: %w", err)
	}
	return b.Layers.DropLayer(ctx, snapshot)
}

// Trim removes the layers that were not used for longest, and that no build uses, until what is left is in the configured bounds.
func (b *Builder) Trim(ctx context.Context) error {
	all, err := b.Layers.Layers(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	var sum int64
	for _, l := range all {
		sum += l.Bytes
	}
	full := b.storeAbove(b.Config.Store.HighWatermark)
	var errs []error
	for _, l := range all {
		if sum <= int64(b.Config.Templates.Cache) && b.Config.Templates.Cache > 0 && !full {
			break
		}
		gone, err := b.evict(ctx, l.Snapshot)
		errs = append(errs, err)
		if gone {
			sum -= l.Bytes
			full = full && b.storeAbove(b.Config.Store.LowWatermark)
		}
	}
	return errors.Join(errs...)
}

// trim is Trim for a build, of which it is no failure that others' layers can't be removed.
func (b *Builder) trim(ctx context.Context) {
	if err := b.Trim(ctx); err != nil {
		b.Log.Warn("disks of steps that are too many can't be removed", "error", err)
	}
}

// Purge removes all layers of a team; those that builds use are left, and go when another one needs the room.
func (b *Builder) Purge(ctx context.Context, team string) error {
	all, err := b.Layers.Layers(ctx)
	errs := []error{err}
	for _, l := range all {
		if l.Team == team {
			_, err := b.evict(ctx, l.Snapshot)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// evict removes a layer that no build uses.
func (b *Builder) evict(ctx context.Context, snapshot string) (gone bool, err error) {
	b.mu.Lock()
	if b.users == nil {
		b.users = map[string]int{}
	}
	used := b.users[snapshot] != 0
	if !used {
		b.users[snapshot] = doomed
	}
	b.mu.Unlock()
	if used {
		return false, nil
	}
	err = b.removeLayer(ctx, snapshot)
	b.mu.Lock()
	delete(b.users, snapshot)
	b.mu.Unlock()
	return err == nil, err
}

func (b *Builder) storeAbove(percent int) bool {
	dir := b.Config.StoreDir()
	space.Settle(dir)
	r, err := space.Of(dir)
	return err == nil && r.Above(percent)
}

// Open puts in order what the builder of before has left: its machines are removed and then, as none can be saved any more, layers that
// are half made. No build may be under way, and builds' snapshots that no template has are removed only afterwards.
func (b *Builder) Open(ctx context.Context) error {
	errs := []error{b.removeMachines(ctx)}
	all, err := b.Layers.Layers(ctx)
	errs = append(errs, err)
	for _, l := range all {
		if !l.Ready {
			errs = append(errs, b.removeLayer(ctx, l.Snapshot))
		}
	}
	return errors.Join(append(errs, b.Trim(ctx))...)
}

// removeMachines removes all that builds have begun.
func (b *Builder) removeMachines(ctx context.Context) error {
	all, err := b.Machines.All(ctx)
	if err != nil {
		return fmt.Errorf("look for the machines of builds of before: %w", err)
	}
	var removed errgroup.Group
	for id := range all {
		if strings.HasPrefix(id, machinePrefix) {
			removed.Go(b.remover(ctx, id))
		}
	}
	return removed.Wait()
}
