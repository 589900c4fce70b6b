package lifecycle

import (
	"context"
	"sync/atomic"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// cause is what a sandbox's state has come of, for the record of what was done. It is in the row, so that what was begun is told
// of by the engine that ends it, whichever that is.
type cause struct {
	Action audit.Action `json:"action"`
	audit.By
	// Snapshot is the one that is made or gone back to.
	Snapshot string `json:"snapshot,omitempty"`
}

// ask is what somebody has asked for, on its way to a row.
type ask struct {
	cause
	// begun says that it is in a row, or in the record: what comes of it is told there.
	begun atomic.Bool
	// about is what is known of a sandbox that has no row yet.
	about audit.Entry
}

type askKey struct{}

// asked has what is done in the context be an action on somebody's behalf. If nothing was begun, end tells of the error.
func (e *Engine) asked(ctx context.Context, action audit.Action, about audit.Entry) (_ context.Context, end func(*error)) {
	a := &ask{cause: cause{Action: action, By: audit.Of(ctx), Snapshot: about.Snapshot}, about: about}
	if a.Via == "" {
		a.Via = audit.Host
	}
	return context.WithValue(ctx, askKey{}, a), func(err *error) {
		if *err == nil || a.begun.Load() {
			return
		}
		entry := a.about
		entry.Action, entry.By = a.Action, a.By
		entry.Result, entry.Error = audit.Outcome(*err)
		e.Audit.Record(entry)
	}
}

// onBehalf is the ask of a context, nil if nobody has asked.
func onBehalf(ctx context.Context) *ask {
	a, _ := ctx.Value(askKey{}).(*ask)
	return a
}

// causeOf is why a sandbox enters a state that has something done.
func causeOf(ctx context.Context, ev event, to State) *cause {
	if a := onBehalf(ctx); a != nil {
		a.begun.Store(true)
		c := a.cause
		return &c
	}
	switch {
	case ev == evExpire && to == Pausing:
		return &cause{Action: audit.Pause, By: audit.By{Via: audit.Deadline}}
	case ev == evKill: // by the engine, which says why in the row
		return &cause{Action: audit.Kill, By: audit.By{Via: audit.Host}}
	case ev == evExpire:
		return &cause{Action: audit.Kill, By: audit.By{Via: audit.Deadline}}
	case ev == evGone:
		return &cause{Action: audit.End, By: audit.By{Via: audit.Host}}
	}
	return nil // what was begun with it has failed, which is told
}

// goals are the states that end another one's work well.
var goals = map[State]State{Creating: Running, Pausing: Paused, Resuming: Running, Snapshotting: Running, Killing: gone}

// record tells what has come of what was done, if a row says that: before it is written, so that nothing is left out whatever
// becomes of the process. What is told and not written then is told again.
func (e *Engine) record(was, is *row) {
	if was.State == is.State {
		return
	}
	c, ok := was.Cause, true
	switch {
	case was.State.busy():
		ok = is.State == goals[was.State] && is.failed == nil
	case is.State == Paused: // by somebody else
		c = &cause{Action: audit.Pause, By: audit.By{Via: audit.Host}}
	case is.State == Running:
		c = &cause{Action: audit.Resume, By: audit.By{Via: audit.Host}}
	default: // it begins
		return
	}
	if c == nil {
		return
	}
	if was.ask != nil {
		was.ask.begun.Store(true)
	}
	entry := is.entry()
	entry.Action, entry.By, entry.Snapshot, entry.Result = c.Action, c.By, c.Snapshot, audit.OK
	if !ok {
		entry.Result, entry.Error = audit.Failed, "aborted" // by what has happened to it
		if is.failed != nil {
			entry.Error = audit.Class(is.failed)
		}
	}
	if is.saved != "" {
		entry.Snapshot = is.saved
	}
	if is.State == gone {
		entry.Why = is.Reason
	}
	e.Audit.Record(entry)
}

// auditName is what a client has called a snapshot or template, if that can be a name at all: nothing else gets into the record.
func auditName(name string) string {
	if ref, err := db.ParseRef(name); err == nil {
		return ref.String()
	}
	return ""
}

// entry is what the record says of a sandbox.
func (r *row) entry() audit.Entry {
	return audit.Entry{Team: r.Team, Sandbox: r.ID, Origin: r.Origin, Template: r.TemplateID, Build: r.BuildID}
}
