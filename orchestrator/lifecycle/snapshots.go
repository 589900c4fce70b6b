package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// maxFork bounds how many children one fork makes.
const maxFork = 100

// saving does something with a running sandbox that goes on, when whoever does so is through. change changes its row for the time of
// that; nil doesn't. What has become of the sandbox is do's outcome. It is given up when ctx ends.
func (e *Engine) saving(ctx context.Context, team, id string, change func(*row) error, do func(context.Context, *row) outcome) (*row, error) {
	b, r, err := e.find(team, id)
	if err == nil {
		err = e.Audit.Ready()
	}
	if err != nil {
		return nil, err
	}
	if r.State.Shown() == "" {
		return nil, e.missing(team, id)
	}
	for {
		if r.State == Snapshotting {
			if r, err = b.rest(ctx); err != nil {
				return nil, err
			}
		}
		seen := r
		_, is, err := e.step(ctx, b, nil, evSave, change)
		if err != nil {
			if r = b.row.Load(); r != nil && r != seen && r.State == Snapshotting {
				continue // somebody else was faster
			}
			return nil, err
		}
		j := e.start(ctx, b, e.life, saveTimeout, func(ctx context.Context) outcome { return do(ctx, is) })
		stop := context.AfterFunc(ctx, func() { j.stop(context.Cause(ctx)) })
		defer stop()
		<-j.done
		return is, j.err
	}
}

// Snapshot makes a template of a running sandbox, which goes on: another build of the one that has the name, if there is one.
// name is NAME[:TAG], "" has a template without.
func (e *Engine) Snapshot(ctx context.Context, team, id, name string) (_ Snapshot, err error) {
	ctx, end := e.asked(ctx, audit.Snapshot, audit.Entry{Team: team, Sandbox: id, Snapshot: auditName(name)})
	defer end(&err)
	var ref db.Ref
	if name != "" {
		var err error
		if ref, err = db.ParseRef(name); err != nil {
			return Snapshot{}, err
		}
		if ref.Team != "" && ref.Team != team {
			return Snapshot{}, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("name: %q is of team %s: a snapshot is its sandbox's team's, which is %s", name, ref.Team, team))
		}
	}
	if ref.Tag == "" {
		ref.Tag = db.DefaultTag
	}
	if _, _, err := e.find(team, id); err != nil {
		return Snapshot{}, err
	}
	done, err := e.ledger.BeginSnapshot(team, func() (int, error) { return e.db.CountSnapshots(ctx, team) })
	if err != nil {
		return Snapshot{}, e.refused(err)
	}
	defer done()
	var made Snapshot
	_, err = e.saving(ctx, team, id, nil, func(ctx context.Context, r *row) outcome {
		build, done, err := e.build(ctx, r)
		if err != nil {
			return outcome{err: err}
		}
		defer done()
		if err := e.save(ctx, r, build); err != nil {
			return outcome{err: fmt.Errorf("make a snapshot of sandbox %s: %w", r.ID, err)}
		}
		template, err := e.db.Publish(ctx, db.Publication{Build: build.ID, Team: team, Name: ref.Name, Template: randomID(20), Tag: ref.Tag, Snapshot: true})
		if err != nil {
			return outcome{event: evRuns, err: err}
		}
		e.outlived()
		made = snapshotOf(team, template, ref.Name, ref.Tag, time.Now())
		return outcome{event: evRuns, change: func(r *row) error { r.saved = made.ID; return nil }}
	})
	return made, err
}

func (e *Engine) save(ctx context.Context, r *row, b db.Build) error {
	return e.stage(ctx, stageSave, r.ID, func(ctx context.Context) error { return e.machines.Save(ctx, r.ID, b.Snapshot) })
}

// snapshotOf is a template's tag as users see it.
func snapshotOf(team, template, name, tag string, at time.Time) Snapshot {
	s := Snapshot{ID: template + ":" + tag, Names: []string{}, CreatedAt: at}
	if name != "" {
		s.ID = team + "/" + name + ":" + tag
		s.Names = []string{s.ID}
	}
	return s
}

// build begins the making of a build of a sandbox. Until done is called nobody takes it for forgotten.
func (e *Engine) build(ctx context.Context, r *row) (b db.Build, done func(), err error) {
	id := uuid.NewString()
	b = db.Build{ID: id, Team: r.Team, Key: audit.Of(ctx).Key, Origin: r.ID, CreatedAt: time.Now(), CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB, Settings: r.Settings}
	if b.Snapshot, done, err = e.Begin(ctx, b); err != nil {
		return db.Build{}, nil, err
	}
	return b, done, nil
}

// buildSnapshot is what a build's snapshot is called in the store.
func buildSnapshot(build string) string { return "build-" + build }

// sweep is sweepNow for whom its end is nothing.
func (e *Engine) sweep() {
	ctx, cancel := context.WithTimeout(e.last, e.Timeout(saveTimeout))
	defer cancel()
	if err := e.sweepNow(ctx); err != nil {
		e.Log.Warn("snapshots that nobody needs can't be deleted yet", "error", err)
	}
}

// sweepBuild sweeps if a build that a sandbox was of is no template's any more: that may have been the last one.
func (e *Engine) sweepBuild(id string) {
	ctx, cancel := context.WithTimeout(e.life, e.Timeout(lookTimeout))
	defer cancel()
	if b, err := e.db.Build(ctx, id); err == nil && b.Template == "" {
		e.sweep()
	}
}

// sweepNow deletes the snapshots of machines that nobody needs any more, and what there is of those that came to nothing.
func (e *Engine) sweepNow(ctx context.Context) error {
	select { // one at a time, so that what is to be deleted is when this returns
	case e.sweeps <- struct{}{}:
		defer func() { <-e.sweeps }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	errs := []error{e.retire(ctx), e.machines.Sweep(ctx)}
	seen, err := e.db.Loose(ctx)
	taken, forget := e.drop(seen)
	defer forget()
	// What somebody wanted when it was seen may be a template's by now. What was taken can't become one.
	loose, again := e.db.Loose(ctx)
	errs = append(errs, err, again)
	for _, b := range loose {
		if !taken[b.ID] {
			continue
		}
		err := e.machines.Forget(ctx, b.Snapshot)
		if err == nil {
			err = e.db.DropBuild(ctx, b.ID)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Snapshots lists a team's, newest first.
func (e *Engine) Snapshots(ctx context.Context, team string, f SnapshotFilter) (page []Snapshot, next Cursor, err error) {
	q := db.SnapshotFilter{Origin: f.Sandbox, Page: db.Page{After: f.After.At, AfterID: f.After.ID, Limit: f.Limit + 1}}
	if f.Name != "" {
		ref, err := db.ParseRef(f.Name)
		if err != nil {
			return nil, Cursor{}, err
		}
		if ref.Team != "" && ref.Team != team {
			return nil, Cursor{}, nil
		}
		q.Ref = &ref
	}
	all, err := e.db.Snapshots(ctx, team, q)
	if err != nil {
		return nil, Cursor{}, err
	}
	for i, t := range all {
		if i == f.Limit {
			last := all[i-1]
			next = Cursor{At: last.Tag.AssignedAt, ID: last.Template.ID + ":" + last.Tag.Name}
			break
		}
		name := ""
		if len(t.Template.Names) > 0 {
			name = t.Template.Names[0]
		}
		page = append(page, snapshotOf(team, t.Template.ID, name, t.Tag.Name, t.Tag.AssignedAt))
	}
	return page, next, nil
}

// DeleteSnapshot deletes a snapshot by its ID, or a template without its tag, unless there are sandboxes of it. Its space is free
// when nothing uses it any more.
func (e *Engine) DeleteSnapshot(ctx context.Context, team, id string) (err error) {
	defer func() {
		entry := audit.Entry{Action: audit.Delete, By: audit.Of(ctx), Team: team, Snapshot: auditName(id)}
		entry.Result, entry.Error = audit.Outcome(err)
		e.Audit.Record(entry)
	}()
	if err := e.Ready(); err != nil {
		return err
	}
	ref, err := db.ParseRef(id)
	if err != nil {
		return err
	}
	if err := e.db.DeleteTemplate(ctx, team, ref); err != nil {
		return err
	}
	e.background(e.sweep)
	return nil
}

// Fork makes n sandboxes that go on from where a running one is, which goes on, too: for d, and otherwise as it was created. One
// that can't be made is an error in its place. The error is one of all.
func (e *Engine) Fork(ctx context.Context, team, id string, d time.Duration, n int) (_ []ForkResult, err error) {
	asking := ctx
	ctx, end := e.asked(ctx, audit.Fork, audit.Entry{Team: team, Sandbox: id})
	defer end(&err)
	if n < 1 || n > maxFork {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("count: %d isn't between 1 and %d", n, maxFork))
	}
	if err := e.allowed(d); err != nil {
		return nil, err
	}
	var build db.Build
	var done func()
	parent, err := e.saving(ctx, team, id, nil, func(ctx context.Context, r *row) (o outcome) {
		if build, done, o.err = e.build(ctx, r); o.err != nil {
			return o
		}
		if err := e.save(ctx, r, build); err != nil {
			return outcome{err: fmt.Errorf("save sandbox %s: %w", r.ID, err)}
		}
		return outcome{event: evRuns}
	})
	if done != nil {
		defer done() // the children go on without it
	}
	if err != nil {
		return nil, err
	}
	results := make([]ForkResult, n)
	var children sync.WaitGroup
	for i := range results {
		children.Go(func() {
			child := &row{ID: newSandboxID(), Team: parent.Team, TemplateID: parent.TemplateID, BuildID: parent.BuildID, State: Creating, Metadata: parent.Metadata, spec: parent.spec}
			child.Timeout, child.Origin, child.Request = d, parent.ID, randomID(20)
			child.Requests, child.Epoch, child.Reason, child.Cause, child.Key, child.Ephemeral = nil, "", "", nil, "", false
			ctx, end := e.asked(asking, audit.Fork, child.entry())
			defer end(&results[i].Err)
			results[i].Sandbox, results[i].Err = e.make(ctx, child, build.Snapshot, whyFork)
		})
	}
	children.Wait()
	return results, nil
}

// Rollback puts a running sandbox back to a snapshot that was made of it, by the snapshot's ID. What it was connected to isn't any more.
func (e *Engine) Rollback(ctx context.Context, team, id, snapshot string) (err error) {
	ctx, end := e.asked(ctx, audit.Rollback, audit.Entry{Team: team, Sandbox: id, Snapshot: auditName(snapshot)})
	defer end(&err)
	if _, _, err := e.find(team, id); err != nil {
		return err
	}
	ref, err := db.ParseRef(snapshot)
	if err != nil {
		return err
	}
	_, build, err := e.db.Resolve(ctx, team, ref)
	if err != nil {
		return err
	}
	if build.Origin != id {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("snapshot '%s' was not made of sandbox '%s'", snapshot, id))
	}
	rewinds := func(r *row) error { r.rewinding = true; return nil }
	_, err = e.saving(context.WithoutCancel(ctx), team, id, rewinds, func(ctx context.Context, r *row) outcome {
		err := e.stage(ctx, stageRewind, r.ID, func(ctx context.Context) error { return e.machines.Rollback(ctx, r.ID, build.Snapshot) })
		if err != nil {
			return outcome{err: fmt.Errorf("roll sandbox %s back: %w", r.ID, err)}
		}
		told := r.clone()
		told.Request = randomID(20)
		err = e.introduce(ctx, told, r.addr, whyRollback)
		return outcome{err: err, event: evRuns, change: func(r *row) error {
			r.Epoch, r.Request = randomID(16), told.Request
			return nil
		}}
	})
	return err
}

// maxRequests is how many requests of InitAgain are remembered.
const maxRequests = 32

// InitAgain gives a running sandbox another environment and tells its template's hook. A request that was done before is not
// done again; "" is one of its own.
func (e *Engine) InitAgain(ctx context.Context, team, id string, env map[string]string, request string) (err error) {
	ctx, end := e.asked(ctx, audit.Init, audit.Entry{Team: team, Sandbox: id})
	defer end(&err)
	for k := range env {
		if Reserved(k) {
			return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("envVars: %s is set by the sandbox's identity alone", k))
		}
	}
	if len(request) > 128 || strings.ContainsFunc(request, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return errdefs.ErrInvalidArgument.WithMessage("the request id: up to 128 visible ASCII characters are possible")
	}
	if request == "" {
		request = randomID(20)
	}
	_, err = e.saving(ctx, team, id, nil, func(ctx context.Context, r *row) outcome {
		for _, done := range r.Requests {
			if done == request {
				return outcome{event: evRuns}
			}
		}
		told := r.clone()
		told.Env, told.Request = env, request
		if err := e.introduce(ctx, told, r.addr, whyInit); err != nil {
			return outcome{event: evRuns, err: err}
		}
		return outcome{event: evRuns, change: func(r *row) error {
			r.Env = env
			r.Requests = append(r.Requests[max(0, len(r.Requests)-maxRequests+1):len(r.Requests):len(r.Requests)], request)
			return nil
		}}
	})
	return err
}
