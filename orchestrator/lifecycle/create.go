package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// Create makes a sandbox, of a member of the pool if there is one, and returns when it can be used. When ctx ends before, there is
// none.
func (e *Engine) Create(ctx context.Context, c Create) (_ Sandbox, err error) {
	ctx, end := e.asked(ctx, audit.Create, audit.Entry{Team: c.Team, Snapshot: auditName(cmp.Or(c.Template, c.Image))})
	defer end(&err)
	if err := e.Ready(); err != nil {
		return Sandbox{}, err
	}
	if err := e.Audit.Ready(); err != nil {
		return Sandbox{}, err
	}
	if err := e.allowed(c.Timeout); err != nil {
		return Sandbox{}, err
	}
	for tries := 1; ; tries++ {
		sb, err := e.createOf(ctx, c)
		if gone := (*db.BuildGone)(nil); tries < mostBuilds && errors.As(err, &gone) {
			continue // another one has been built since this one was found
		}
		return sb, err
	}
}

// mostBuilds is how many builds of a template a create finds, each of which is gone when it is to be used.
const mostBuilds = 3

// createOf makes a sandbox of the build that there is.
func (e *Engine) createOf(ctx context.Context, c Create) (Sandbox, error) {
	t, b, alias, err := e.origin(ctx, c)
	if err != nil {
		return Sandbox{}, err
	}
	r := &row{
		ID: newSandboxID(), Team: c.Team, TemplateID: t.ID, BuildID: b.ID, State: Creating, Metadata: c.Metadata,
		spec: spec{
			Timeout: c.Timeout, CPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB, Profile: cmp.Or(c.Profile, admission.Profile(b.Settings.Profile)), Env: c.Env, Network: c.Network.clone(), AllowInternet: clonePtr(c.AllowInternet),
			AutoPause: c.AutoPause, AutoPauseMemory: c.AutoPauseMemory, AutoResume: c.AutoResume, Secure: c.Secure, Ephemeral: c.Ephemeral, Settings: b.Settings, Origin: b.Origin, Request: c.RequestID,
		},
	}
	if r.Request == "" {
		r.Request = randomID(20)
	}
	r.Alias = alias
	asked := onBehalf(ctx)
	asked.about = r.entry()
	asked.about.Sandbox, asked.about.Snapshot = "", asked.Snapshot // there is none yet
	if b.Origin != "" {
		asked.Action = audit.Restore
	}
	if b.Settings.Image != "" { // which the pool can't keep ready
		sb, err := e.make(ctx, r, "", whyCreate)
		if err == nil {
			e.promote(t, b)
		}
		return sb, err
	}
	if m := e.pool.take(b); m != nil {
		if sb, ok, err := e.fromPool(ctx, r, m); ok {
			return sb, err
		}
	}
	return e.make(ctx, r, b.Snapshot, whyCreate)
}

// origin is what a sandbox is made of, and how the create calls it, "" by its id.
func (e *Engine) origin(ctx context.Context, c Create) (t db.Template, b db.Build, alias string, err error) {
	if c.Image != "" {
		t, b, err = e.ofImage(ctx, c.Team, c.Image)
		return t, b, c.Image, err
	}
	ref, err := db.ParseRef(c.Template)
	if err != nil {
		return t, b, "", err
	}
	if t, b, err = e.db.Resolve(ctx, c.Team, ref); err == nil && ref.Name != t.ID {
		alias = ref.Name
	}
	return t, b, alias, err
}

// allowed checks how long a sandbox is to run.
func (e *Engine) allowed(d time.Duration) error {
	if e.MaxTimeout > 0 && d > e.MaxTimeout {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("timeout: %v is more than sandboxes here may run, which is %v", d, e.MaxTimeout))
	}
	return nil
}

// make makes the sandbox of a new row from a snapshot.
func (e *Engine) make(ctx context.Context, r *row, snapshot, why string) (sb Sandbox, err error) {
	err = e.stage(ctx, stageCreate, r.ID, func(ctx context.Context) (err error) {
		sb, err = e.made(ctx, r, snapshot, why)
		return err
	})
	return sb, err
}

func (e *Engine) made(ctx context.Context, r *row, snapshot, why string) (Sandbox, error) {
	release, err := e.admit(ctx, r, true)
	if err != nil {
		return Sandbox{}, err
	}
	defer release()
	return e.born(ctx, r, e.db.AddSandbox, func(ctx context.Context) outcome { return e.creating(ctx, r, snapshot, why, release) })
}

// born writes a new row, and has come about what it says: do is the work of its state.
func (e *Engine) born(ctx context.Context, r *row, write func(context.Context, db.Sandbox) error, do func(context.Context) outcome) (Sandbox, error) {
	if a := onBehalf(ctx); a != nil {
		r.ask, r.Cause, r.Key = a, &a.cause, a.Key
	}
	r.StartedAt = time.Now()
	r.EndAt = r.StartedAt.Add(r.Timeout)
	s, err := r.encode()
	if err != nil {
		return Sandbox{}, err
	}
	if err := e.stage(ctx, stageRow, r.ID, func(ctx context.Context) error { return write(ctx, s) }); err != nil {
		return Sandbox{}, err
	}
	b, err := e.add(r)
	if err != nil { // the next engine removes the row
		return Sandbox{}, err
	}
	j := e.start(ctx, b, e.life, createTimeout, do)
	stop := context.AfterFunc(ctx, func() { j.stop(context.Cause(ctx)) })
	defer stop()
	<-j.done // it is given up when ctx ends
	now := b.row.Load()
	if j.err == nil && now != nil && now.State != Killing {
		return e.sandbox(now), nil
	}
	e.killed(b)
	if j.err == nil {
		return Sandbox{}, errKilled
	}
	return Sandbox{}, j.err
}

// add makes a new row known.
func (e *Engine) add(r *row) (*box, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.open {
		return nil, errClosing
	}
	b := newBox(r)
	e.boxes[r.ID] = b
	e.account(r)
	return b, nil
}

// killed waits until a sandbox that is being killed is gone, or its killing is put off.
func (e *Engine) killed(b *box) {
	b.mu.Lock()
	j := b.job
	b.mu.Unlock()
	<-j.done
}

// creating calls up when the machine is.
func (e *Engine) creating(ctx context.Context, r *row, snapshot, why string, up func()) outcome {
	var addr netip.Addr
	var version string
	known := func(*row) {}
	err := e.stage(ctx, stageMachine, r.ID, func(ctx context.Context) (err error) {
		if r.Settings.Image != "" {
			addr, known, err = e.beginning(ctx, r)
			return err
		}
		addr, err = e.machines.Create(ctx, Machine{ID: r.ID, Team: r.Team, Snapshot: snapshot, Container: r.Settings.Container, Network: r.egress()})
		return err
	})
	_ = e.refused(err) // counts it
	if err == nil {
		up() // what it is told may take its time
		err = e.introduce(ctx, r, addr, why)
	}
	if version = r.Settings.EnvdVersion; err == nil && version == "" {
		version, err = e.guests.Version(ctx, addr)
	}
	if err != nil {
		return outcome{event: evUnfit, err: err}
	}
	begins := e.begins(addr, r.Timeout)
	return outcome{event: evRuns, change: func(r *row) error {
		known(r)
		r.Settings.EnvdVersion = version
		return begins(r)
	}}
}
