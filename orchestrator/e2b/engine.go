package e2b

import (
	"context"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// What answers requests but in tests.
var (
	_ Engine    = (*lifecycle.Engine)(nil)
	_ Keys      = (*db.DB)(nil)
	_ Templates = (*db.DB)(nil)
	_ Builds    = (*builds.Service)(nil)
)

// Engine is what the API has sandboxes done by: a lifecycle.Engine. A sandbox or snapshot of another team isn't found.
type Engine interface {
	Create(ctx context.Context, c lifecycle.Create) (lifecycle.Sandbox, error)
	Get(ctx context.Context, team, id string) (lifecycle.Sandbox, error)
	// List returns a page, where the next one begins (zero if there is none), and how many sandboxes that run are asked for in
	// all.
	List(ctx context.Context, team string, f lifecycle.Filter) (page []lifecycle.Sandbox, next lifecycle.Cursor, running int, err error)
	Kill(ctx context.Context, team, id string) error
	// SetTimeout has it end so long from now, Refresh not before that.
	SetTimeout(ctx context.Context, team, id string, d time.Duration) error
	Refresh(ctx context.Context, team, id string, d time.Duration) error
	// Connect has it run for at least so long, and tells whether it was paused. memory false has it begin anew with its disk; nil
	// is as it was paused.
	Connect(ctx context.Context, team, id string, d time.Duration, memory *bool) (sb lifecycle.Sandbox, resumed bool, err error)
	// Resume is Connect of one that must be paused.
	Resume(ctx context.Context, team, id string, d time.Duration, memory *bool) (lifecycle.Sandbox, error)
	Pause(ctx context.Context, team, id string, memory bool) error
	Fork(ctx context.Context, team, id string, d time.Duration, n int) ([]lifecycle.ForkResult, error)
	Snapshot(ctx context.Context, team, id, name string) (lifecycle.Snapshot, error)
	// Rollback puts a sandbox that runs back to a snapshot of itself.
	Rollback(ctx context.Context, team, id, snapshot string) error
	Snapshots(ctx context.Context, team string, f lifecycle.SnapshotFilter) (page []lifecycle.Snapshot, next lifecycle.Cursor, err error)
	UpdateNetwork(ctx context.Context, team, id string, n lifecycle.Network, allowInternet *bool) error
	// InitAgain gives a sandbox another environment. A request that was done isn't done again.
	InitAgain(ctx context.Context, team, id string, env map[string]string, request string) error
	// Exec runs a command line in a sandbox to its end, and hands what it writes to out as it comes.
	Exec(ctx context.Context, team, id, line string, out func(lifecycle.Output)) (lifecycle.Exit, error)
	// Metrics are oldest first. Zero times are no bounds.
	Metrics(ctx context.Context, team, id string, from, to time.Time) ([]lifecycle.Metric, error)
	Logs(ctx context.Context, team, id string, q lifecycle.LogQuery) ([]lifecycle.LogEntry, error)
	// FollowLog tells the entries from a start on, and with follow what comes until the sandbox is gone.
	FollowLog(ctx context.Context, team, id string, from lifecycle.LogStart, follow bool, each func(lifecycle.LogEntry) error) error
	// Capacity tells what there is room for, and how many of each shape.
	Capacity(team string, shapes []admission.Shape) (lifecycle.Capacity, error)
	// Watch tells of all of the team's sandboxes, and then of those that change.
	Watch(ctx context.Context, team string, each func(lifecycle.Change) error) error
}
