package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// Kept says what is kept of a team.
type Kept func(team string) config.Kept

// Kinds of what isn't kept any more.
const (
	ExpiredSnapshot = "snapshot"
	ExpiredPaused   = "paused" // a sandbox
)

// Expired is what isn't kept any more.
type Expired struct {
	Kind string
	// Name is a snapshot's ID, or a sandbox's.
	Name, Team string
	// Machine is the name of its machine's snapshot in the store, "" for a paused sandbox's.
	Machine string
	Why     string
	// Used says that sandboxes are of it: it goes with the last of them.
	Used int

	remove func(context.Context) (gone bool, err error)
}

// Remove removes it, unless somebody has a use for it by now, and tells whether it has. It is in the log and in the audit log.
func (x Expired) Remove(ctx context.Context) (gone bool, err error) { return x.remove(ctx) }

// longestKeep bounds how long retention sleeps, for when the wall clock is set meanwhile: timers don't know.
const longestKeep = time.Hour

// Expired tells what isn't kept by now, and when the next thing won't be, zero if there is none that time makes so.
func (e *Engine) Expired(ctx context.Context, kept Kept) (all []Expired, next time.Time, err error) {
	if err := e.Ready(); err != nil {
		return nil, next, err
	}
	snapshots, err := e.db.SavedByAll(ctx)
	if err != nil {
		return nil, next, err
	}
	p := &keeping{now: time.Now(), kept: kept}
	e.paused(p)
	for _, s := range snapshots {
		e.snapshot(p, s)
	}
	return p.expired, p.next, nil
}

// keeping is a look at what is kept.
type keeping struct {
	now     time.Time
	kept    Kept
	counted map[string]int // by what is counted, how many newer ones there are
	expired []Expired
	next    time.Time
}

// why says why something isn't kept that is of that time, "" if it is: of its kind, and newest first, most are kept, for so long.
func (p *keeping) why(kind, of string, at time.Time, most int, ttl time.Duration) string {
	if p.counted == nil {
		p.counted = map[string]int{}
	}
	n := p.counted[kind+" "+of]
	p.counted[kind+" "+of]++
	end := at.Add(ttl)
	switch {
	case ttl > 0 && !p.now.Before(end):
		return fmt.Sprintf("retention: it is of %s, and what is older than %v isn't kept", at.Format(time.RFC3339), ttl)
	case most > 0 && n >= most:
		return fmt.Sprintf("retention: there are %d newer ones of %s, and no more are kept", most, of)
	}
	if ttl > 0 && (p.next.IsZero() || end.Before(p.next)) {
		p.next = end
	}
	return ""
}

// paused looks at the sandboxes that are paused.
func (e *Engine) paused(p *keeping) {
	type still struct {
		b *box
		r *row
	}
	var all []still
	e.mu.Lock()
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil && r.State == Paused {
			all = append(all, still{b, r})
		}
	}
	e.mu.Unlock()
	slices.SortFunc(all, func(a, b still) int { return cmp.Or(b.r.EndAt.Compare(a.r.EndAt), cmp.Compare(a.r.ID, b.r.ID)) })
	for _, s := range all {
		k := p.kept(s.r.Team)
		if why := p.why(ExpiredPaused, "team "+s.r.Team, s.r.EndAt, k.PausedKeep, k.PausedTTL); why != "" {
			p.expired = append(p.expired, Expired{Kind: ExpiredPaused, Name: s.r.ID, Team: s.r.Team, Why: why,
				remove: func(ctx context.Context) (bool, error) { return e.discard(ctx, s.b, s.r, why) }})
		}
	}
}

// discard kills a paused sandbox, unless it is another by now than it was seen to be.
func (e *Engine) discard(ctx context.Context, b *box, seen *row, why string) (bool, error) {
	ctx, _ = e.asked(audit.With(ctx, audit.By{Via: audit.Retention}), audit.Kill, audit.Entry{})
	_, is, err := e.step(ctx, b, seen, evKill, func(r *row) error { r.Reason = why; return nil })
	switch {
	case errors.Is(err, errStale), errdefs.IsNotFound(err), errdefs.IsFailedPrecondition(err):
		return false, nil
	case err != nil:
		return false, err
	}
	e.Log.Info("a paused sandbox isn't kept any more", "sandbox", b.id, "team", seen.Team, "why", why)
	return true, e.work(ctx, b, is).wait(ctx)
}

// snapshot looks at one of a sandbox.
func (e *Engine) snapshot(p *keeping, s db.Saved) {
	t, of, name := s.Template, "sandbox "+s.Origin, ""
	if len(t.Names) > 0 {
		name = t.Names[0]
		of = "snapshot " + t.Team + "/" + name
	}
	k := p.kept(t.Team)
	why := p.why(ExpiredSnapshot, of, s.Tag.AssignedAt, k.SnapshotKeep, k.SnapshotTTL)
	if why == "" {
		return
	}
	id := snapshotOf(t.Team, t.ID, name, s.Tag.Name, s.Tag.AssignedAt).ID
	p.expired = append(p.expired, Expired{Kind: ExpiredSnapshot, Name: id, Team: t.Team, Machine: s.Machine, Why: why, Used: s.Used,
		remove: func(ctx context.Context) (bool, error) {
			gone, err := e.db.DropTag(ctx, t.ID, s.Tag.Name, s.Tag.Build)
			if gone {
				e.Log.Info("a snapshot isn't kept any more", "snapshot", id, "team", t.Team, "why", why)
				e.Audit.Record(audit.Entry{Action: audit.Delete, Result: audit.OK, Team: t.Team, By: audit.By{Via: audit.Retention},
					Origin: s.Origin, Template: t.ID, Build: s.Tag.Build, Snapshot: id, Why: why})
				e.background(e.sweep)
			}
			return gone, err
		}})
}

// outlived has retention look again: there is something that may not be kept.
func (e *Engine) outlived() {
	select {
	case e.aged <- struct{}{}:
	default:
	}
}

// retain removes what isn't kept when that is so, until the engine's life ends.
func (e *Engine) retain() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-e.aged:
		case <-e.life.Done():
			return
		}
		wait := longestKeep
		next, err := e.removeExpired()
		switch {
		case e.life.Err() != nil:
			return
		case err != nil:
			e.Log.Warn("what isn't kept any more can't all be removed yet", "error", err)
			wait = e.Timeout(lastRetry)
		case !next.IsZero():
			wait = min(max(time.Until(next), 0), longestKeep)
		}
		t.Reset(wait)
	}
}

func (e *Engine) removeExpired() (next time.Time, err error) {
	all, next, err := e.Expired(e.life, e.Kept)
	errs := []error{err}
	for _, x := range all {
		if x.Used > 0 { // the last of them that goes has this looked at again
			continue
		}
		_, err := x.Remove(e.life)
		errs = append(errs, err)
	}
	return next, errors.Join(errs...)
}
