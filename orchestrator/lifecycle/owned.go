package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/teams"
)

// Assets are what the engine has for teams: sandboxes, and what was saved of them or for templates.
func (e *Engine) Assets() (sandboxes, builds teams.Asset) {
	sandboxes = teams.Asset{Kind: "sandbox", List: e.ownSandboxes, Remove: e.killAll}
	builds = teams.Asset{Kind: "snapshot", List: e.ownBuilds, Why: e.usedBy, Remove: func(ctx context.Context, team string) error {
		if err := e.db.DropTeamTemplates(ctx, team); err != nil {
			return err
		}
		return e.sweepNow(ctx)
	}}
	return sandboxes, builds
}

func (e *Engine) ownSandboxes(ctx context.Context, team string) (ids []string, err error) {
	rows, err := e.db.SandboxesIn(ctx)
	for _, s := range rows {
		if s.Team == team {
			ids = append(ids, s.ID)
		}
	}
	return ids, err
}

func (e *Engine) ownBuilds(ctx context.Context, team string) (names []string, err error) {
	builds, err := e.db.TeamBuilds(ctx, team)
	for _, b := range builds {
		names = append(names, b.Snapshot)
	}
	return names, err
}

// killAll kills all sandboxes of a team, and returns when they are gone or can't be killed.
func (e *Engine) killAll(ctx context.Context, team string) error {
	e.mu.Lock()
	var all []*box
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil && r.Team == team {
			all = append(all, b)
		}
	}
	e.mu.Unlock()
	var mu sync.Mutex
	var errs []error
	e.each(all, func(b *box) {
		err := e.Kill(ctx, team, b.id)
		if errdefs.IsNotFound(err) { // it is being killed, or was
			err = b.gone(ctx, e.Timeout(killTimeout))
		}
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
	})
	return errors.Join(errs...)
}

// usedBy says whose sandbox keeps what a build of a team that is no more was saved as, "" if none does.
func (e *Engine) usedBy(snapshot string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil && buildSnapshot(r.BuildID) == snapshot {
			return fmt.Sprintf("sandbox %s of team %s is of it", b.id, r.Team)
		}
	}
	return ""
}
