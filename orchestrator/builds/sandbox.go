package builds

import (
	"context"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// leaveTimeout bounds the deletion of a snapshot that isn't needed any more.
const leaveTimeout = 10 * time.Second

// OfSandbox asks for a build of what a running sandbox of the team's has on its disk; the sandbox goes on. What it runs is as its
// template says.
func (s *Service) OfSandbox(ctx context.Context, r Request, sandbox string) (Created, error) {
	if err := s.ready(); err != nil {
		return Created{}, err
	}
	made, err := s.Create(ctx, r)
	if err != nil {
		return Created{}, err
	}
	// Written down before there is a snapshot, which the next Open deletes if this service ends here.
	plan := Plan{Template: "of-build-" + made.Build, Sandbox: sandbox}
	err = s.db.MoveJob(ctx, made.Build, db.JobWaiting, db.JobWaiting, plan.encode())
	if err == nil {
		_, err = s.engine.Snapshot(ctx, r.Team, sandbox, plan.Template)
	}
	if err == nil {
		if err = s.Start(ctx, r.Team, db.Ref{Name: made.Template}, made.Build, plan, nil); err != nil {
			s.leave(ctx, r.Team, plan)
		}
	}
	if err != nil {
		s.giveUp(ctx, made.Build)
		return Created{}, err
	}
	return made, nil
}

// leave deletes what was made for a build alone that is over.
func (s *Service) leave(ctx context.Context, team string, p Plan) {
	if p.Sandbox == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.Timeout(leaveTimeout))
	defer cancel()
	if err := s.engine.DeleteSnapshot(ctx, team, p.Template); err != nil && !errdefs.IsNotFound(err) {
		s.Log.Warn("the snapshot that a template was made of can't be deleted", "snapshot", p.Template, "team", team, "error", err)
	}
}

// giveUp ends a build that can't be started.
func (s *Service) giveUp(ctx context.Context, build string) {
	if err := s.Cancel(context.WithoutCancel(ctx), build); err != nil && !errdefs.IsNotFound(err) {
		s.Log.Warn("a build that can't be started can't be ended", "build", build, "error", err)
	}
}
