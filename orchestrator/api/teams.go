package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/teams"
	"github.com/cubesandbox/cube/orchestrator/usage"
	"github.com/cubesandbox/cube/shim/saved"
)

// Ownership is what knows whose things are, and how long they are kept.
type Ownership struct {
	DB     *db.DB
	Engine *lifecycle.Engine
	Purger *teams.Purger
}

// OpenTeams has the service know whose things are.
func (s *Service) OpenTeams(o *Ownership) { s.own.Store(o) }

// PurgeTeam removes a team with all that it has. A client that goes away gives it up: another one goes on then.
func (s *Service) PurgeTeam(ctx context.Context, team string) (r teams.Report, err error) {
	own := s.own.Load()
	if own == nil {
		return r, errNotReady
	}
	err = s.ops.run(ctx, opPurge, "", spaceTimeout, func(ctx context.Context) error {
		r, err = own.Purger.Purge(ctx, team)
		return err
	})
	return r, err
}

// PurgeTeam is Service.PurgeTeam.
func (c *Client) PurgeTeam(ctx context.Context, team string) (r teams.Report, err error) {
	if err := db.ValidTeam(team); err != nil {
		return r, err
	}
	err = control.Ask(ctx, c.socket, http.MethodDelete, Root+"teams/"+team, nil, &r)
	return r, err
}

// Prune frees what nobody needs, and what retention doesn't keep, and tells what that is, also with an error. keep is what is kept, nil
// as the daemon was configured.
func (s *Service) Prune(ctx context.Context, dryRun bool, keep *config.Retention) (freed usage.Freed, err error) {
	if keep == nil {
		keep = &s.cfg.Retention
	}
	if err := keep.Validate(); err != nil {
		return freed, errdefs.ErrInvalidArgument.WithMessage(err.Error())
	}
	err = s.ops.run(ctx, opPrune, "", spaceTimeout, func(ctx context.Context) error {
		more, notes, err := s.expired(ctx, keep)
		if err != nil {
			return err
		}
		freed, err = usage.Prune(ctx, s.cfg, usage.Options{DryRun: dryRun, More: more})
		freed.Notes = append(freed.Notes, notes...)
		return err
	})
	return freed, err
}

// expired is what retention doesn't keep, and notes of what it will remove later.
func (s *Service) expired(ctx context.Context, keep *config.Retention) (more []usage.Candidate, notes []string, err error) {
	own := s.own.Load()
	if own == nil {
		return nil, []string{"what teams have saved wasn't looked at: the stack isn't ready yet"}, nil
	}
	all, _, err := own.Engine.Expired(ctx, keep.Of)
	for _, x := range all {
		if x.Used > 0 {
			notes = append(notes, fmt.Sprintf("snapshot %s of team %s goes with the last of the %d sandboxes that are of it: %s", x.Name, x.Team, x.Used, x.Why))
			continue
		}
		machine := x.Machine
		if x.Kind == lifecycle.ExpiredPaused {
			if k, err := saved.PausedOf(s.cfg, s.cfg.Containerd.Namespace, x.Name).Checkpoint(); err == nil {
				machine = k.Snapshot
			}
		}
		more = append(more, usage.Candidate{Kind: x.Kind, Name: x.Name, Why: x.Why, Snapshot: machine, Remove: x.Remove})
	}
	return more, notes, err
}

// owners tells whose things are, by the names of snapshots and the ids of sandboxes.
type owners map[string]db.Owner

// owners asks the database, which knows nothing before the service does.
func (s *Service) owners(ctx context.Context) (owners, error) {
	own := s.own.Load()
	if own == nil {
		return nil, nil
	}
	return own.DB.Owners(ctx)
}

// of tells whose a snapshot is that was made of a pod.
func (o owners) of(snapshot, pod string) (team, key string) {
	owner, ok := o[snapshot]
	if !ok {
		owner = o[pod]
	}
	return owner.Team, owner.Key
}
