package builds

import (
	"context"
	"errors"
	"os"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/teams"
)

// Assets are what the service has for teams: builds that aren't over, and uploads.
func (s *Service) Assets() (jobs, uploads teams.Asset) {
	jobs = teams.Asset{Kind: "template build", List: s.underWay, Remove: func(ctx context.Context, team string) error {
		ids, err := s.underWay(ctx, team)
		errs := []error{err}
		for _, id := range ids {
			if err := s.Cancel(ctx, id); !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) { // it is over
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}}
	return jobs, teams.Asset{Kind: "upload", List: s.uploads.list, Remove: s.uploads.removeAll}
}

// underWay are the ids of a team's builds that aren't over.
func (s *Service) underWay(ctx context.Context, team string) (ids []string, err error) {
	jobs, err := s.db.JobsUnderWay(ctx)
	for _, j := range jobs {
		if j.Team == team {
			ids = append(ids, j.ID)
		}
	}
	return ids, err
}

// list names all files that a team has on the disk, also those that aren't whole.
func (u *Uploads) list(_ context.Context, team string) (names []string, err error) {
	entries, err := os.ReadDir(u.teamDir(team))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

// removeAll removes all that a team has uploaded.
func (u *Uploads) removeAll(_ context.Context, team string) error {
	u.mu.Lock()
	for id, k := range u.all {
		if id.team == team {
			u.used -= k.size
			delete(u.all, id)
		}
	}
	u.mu.Unlock()
	return os.RemoveAll(u.teamDir(team))
}
