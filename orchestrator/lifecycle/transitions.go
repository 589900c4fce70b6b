package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
)

const (
	// maxTransitions is how many transitions of a sandbox Connect waits for.
	maxTransitions = 3
	// minRefresh is what a refresh gives at least.
	minRefresh = 15 * time.Second
	// minAutoResume is what a sandbox gets at least that traffic has resumed.
	minAutoResume = 5 * time.Minute
)

// Get tells of a sandbox. One that is being created or killed isn't there.
func (e *Engine) Get(_ context.Context, team, id string) (Sandbox, error) {
	_, r, err := e.find(team, id)
	if err != nil {
		return Sandbox{}, err
	}
	if r.State.Shown() == "" {
		return Sandbox{}, e.missing(team, id)
	}
	return e.sandbox(r), nil
}

// Kill removes a sandbox, whatever it is doing, and returns when nothing of it is left. Once begun it is finished, whatever
// becomes of ctx, and tried again if it fails.
func (e *Engine) Kill(ctx context.Context, team, id string) (err error) {
	ctx, end := e.asked(ctx, audit.Kill, audit.Entry{Team: team, Sandbox: id})
	defer end(&err)
	b, r, err := e.find(team, id)
	if err != nil {
		return err
	}
	if r.State == Killing {
		return e.missing(team, id)
	}
	was, is, err := e.step(ctx, b, nil, evKill, nil)
	if err != nil {
		return err
	}
	if was.State == Killing {
		return e.missing(team, id)
	}
	return e.work(ctx, b, is).wait(ctx)
}

// Pause saves a sandbox to disk: with its memory, or only its disk. Once begun it is finished, whatever becomes of ctx.
func (e *Engine) Pause(ctx context.Context, team, id string, memory bool) (err error) {
	ctx, end := e.asked(ctx, audit.Pause, audit.Entry{Team: team, Sandbox: id})
	defer end(&err)
	b, r, err := e.find(team, id)
	if err != nil {
		return err
	}
	if r.State == Snapshotting { // which isn't a state for users
		if _, err := b.rest(ctx); err != nil {
			return err
		}
	}
	_, is, err := e.step(ctx, b, nil, evPause, func(r *row) error {
		r.Cold = !memory
		return nil
	})
	if err != nil {
		return err
	}
	return e.work(ctx, b, is).wait(ctx)
}

// Resume has a paused sandbox run, for d. memory false has it boot with its disk; nil is as it was paused.
func (e *Engine) Resume(ctx context.Context, team, id string, d time.Duration, memory *bool) (_ Sandbox, err error) {
	ctx, end := e.asked(ctx, audit.Resume, audit.Entry{Team: team, Sandbox: id})
	defer end(&err)
	b, r, err := e.find(team, id)
	if err != nil {
		return Sandbox{}, err
	}
	if r.State != Paused {
		return Sandbox{}, refused(r, evResume)
	}
	if err := e.allowed(d); err != nil {
		return Sandbox{}, err
	}
	return e.resume(ctx, b, d, memory)
}

// resume is Resume for a sandbox that was paused. Once begun it is finished, whatever becomes of ctx.
func (e *Engine) resume(ctx context.Context, b *box, d time.Duration, memory *bool) (Sandbox, error) {
	r := b.row.Load()
	if r == nil {
		return Sandbox{}, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox '%s' not found", b.id))
	}
	if err := e.Audit.Ready(); err != nil {
		return Sandbox{}, err
	}
	release, err := e.admit(ctx, r, false)
	if err != nil {
		return Sandbox{}, err
	}
	_, is, err := e.step(ctx, b, nil, evResume, func(r *row) error {
		r.Request, r.Next = randomID(20), d
		if memory != nil && !*memory {
			r.Cold = true
		}
		return nil
	})
	if err != nil {
		release()
		return Sandbox{}, err
	}
	j := e.start(ctx, b, e.last, resumeTimeout, func(ctx context.Context) outcome {
		defer release()
		return e.resuming(ctx, is, d, release)
	})
	if err := j.wait(ctx); err != nil {
		return Sandbox{}, err
	}
	now := b.row.Load()
	if now == nil || now.State == Killing {
		return Sandbox{}, errKilled
	}
	return e.sandbox(now), nil
}

// resuming calls up when the machine is.
func (e *Engine) resuming(ctx context.Context, r *row, d time.Duration, up func()) outcome {
	var addr netip.Addr
	var note string
	err := e.stage(ctx, stageResume, r.ID, func(ctx context.Context) (err error) {
		addr, note, err = e.machines.Resume(ctx, r.ID, !r.Cold)
		return err
	})
	if err != nil {
		return outcome{err: fmt.Errorf("resume sandbox %s: %w", r.ID, err)}
	}
	up()
	told := r.clone()
	if note != "" {
		told.Cold = true
		e.Log.Warn("a sandbox has come back without its memory", "sandbox", r.ID, "why", note)
	}
	if err := e.introduce(ctx, told, addr, whyResume); err != nil {
		return outcome{err: errors.Join(err, e.putBack(told))}
	}
	return outcome{event: evRuns, change: e.begins(addr, d)}
}

// Connect has a sandbox run for d at least: it resumes one that is paused, and waits for what is under way with it. It never
// makes a deadline earlier.
func (e *Engine) Connect(ctx context.Context, team, id string, d time.Duration, memory *bool) (sb Sandbox, resumed bool, err error) {
	ctx, end := e.asked(ctx, audit.Resume, audit.Entry{Team: team, Sandbox: id})
	defer end(&err)
	if err := e.allowed(d); err != nil {
		return Sandbox{}, false, err
	}
	for waited := 0; waited <= maxTransitions; {
		b, r, err := e.find(team, id)
		if err != nil {
			return Sandbox{}, false, err
		}
		switch r.State {
		case Creating:
			return Sandbox{}, false, e.missing(team, id)
		case Running, Snapshotting:
			sb, err = e.extend(ctx, b, d)
		case Paused:
			resumed = true
			sb, err = e.resume(ctx, b, d, memory)
		default:
			if r.State == Killing {
				return Sandbox{}, false, refused(r, evResume)
			}
			waited++
			if _, err := b.rest(ctx); err != nil {
				return Sandbox{}, false, err
			}
			continue
		}
		if err == nil || !overtaken(b, r, err) {
			return sb, resumed && err == nil, err
		}
		resumed = false
	}
	return Sandbox{}, false, errRestless(id)
}

// overtaken tells whether something was refused as the sandbox isn't in that state any more, but can be asked for again.
func overtaken(b *box, seen *row, err error) bool {
	now := b.row.Load()
	return errdefs.IsFailedPrecondition(err) && now != seen && now != nil && now.State != Killing
}

func errRestless(id string) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("sandbox '%s' is paused and resumed all the time: try again", id))
}

// wake resumes a sandbox for traffic, if that is how it was created, and waits for what is under way with it.
func (e *Engine) wake(ctx context.Context, id string) error {
	// That it can't be isn't told: whoever has no key could fill the record with that.
	ctx, _ = e.asked(audit.With(ctx, audit.By{Via: audit.Traffic}), audit.Resume, audit.Entry{})
	for waited := 0; waited <= maxTransitions; {
		b, r, err := e.find("", id)
		if err != nil {
			return err
		}
		switch {
		case r.State == Running || r.State == Snapshotting && !r.rewinding:
			return nil
		case r.State == Killing:
			return refused(r, evResume)
		case r.State != Paused:
			waited++
			if _, err := b.rest(ctx); err != nil {
				return err
			}
		case !r.AutoResume:
			return errdefs.ErrPermissionDenied.WithMessage(fmt.Sprintf("sandbox '%s' is paused, and isn't resumed by requests", id))
		case r.Cold:
			return errdefs.ErrPermissionDenied.WithMessage(fmt.Sprintf("sandbox '%s' is paused without its memory, and isn't resumed by requests", id))
		default:
			if _, err := e.resume(ctx, b, max(r.Timeout, minAutoResume), nil); err != nil && !overtaken(b, r, err) {
				return err
			}
		}
	}
	return errRestless(id)
}

// SetTimeout has a sandbox end in d from now, be that earlier or later than before; 0 and less is at once.
func (e *Engine) SetTimeout(ctx context.Context, team, id string, d time.Duration) error {
	b, _, err := e.find(team, id)
	if err != nil {
		return err
	}
	_, err = e.touch(ctx, b, func(r *row) error {
		r.EndAt = e.deadline(r.StartedAt, time.Now().Add(max(d, 0)))
		return nil
	})
	return err
}

// Refresh has a sandbox not end for d at least. It never makes a deadline earlier.
func (e *Engine) Refresh(ctx context.Context, team, id string, d time.Duration) error {
	b, _, err := e.find(team, id)
	if err != nil {
		return err
	}
	_, err = e.extend(ctx, b, max(d, minRefresh))
	return err
}

func (e *Engine) extend(ctx context.Context, b *box, d time.Duration) (Sandbox, error) {
	r, err := e.touch(ctx, b, func(r *row) error {
		if at := e.deadline(r.StartedAt, time.Now().Add(d)); at.After(r.EndAt) {
			r.EndAt = at
		}
		return nil
	})
	if err != nil {
		return Sandbox{}, err
	}
	return e.sandbox(r), nil
}

// touch changes the row of a sandbox that runs.
func (e *Engine) touch(ctx context.Context, b *box, change func(*row) error) (*row, error) {
	_, is, err := e.step(ctx, b, nil, evTouch, change)
	return is, err
}

// UpdateNetwork replaces what a running sandbox reaches, at once, for its open connections too.
func (e *Engine) UpdateNetwork(ctx context.Context, team, id string, n Network, allowInternet *bool) (err error) {
	defer func() {
		entry := audit.Entry{Action: audit.Network, By: audit.Of(ctx), Team: team, Sandbox: id}
		entry.Result, entry.Error = audit.Outcome(err)
		e.Audit.Record(entry)
	}()
	b, _, err := e.find(team, id)
	if err != nil {
		return err
	}
	var before *Egress // if the machine has others
	_, err = e.touch(ctx, b, func(r *row) error {
		was := r.egress()
		r.Network.AllowOut, r.Network.DenyOut = slices.Clone(n.AllowOut), slices.Clone(n.DenyOut)
		r.AllowInternet = clonePtr(allowInternet)
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.Timeout(writeTimeout))
		defer cancel()
		err := ofMachine(e.machines.SetNetwork(sctx, r.ID, r.egress()))
		if err == nil {
			before = &was
		}
		return err
	})
	if err != nil && before != nil { // it couldn't be written down
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.Timeout(writeTimeout))
		defer cancel()
		err = errors.Join(err, e.machines.SetNetwork(sctx, id, *before))
	}
	return err
}
