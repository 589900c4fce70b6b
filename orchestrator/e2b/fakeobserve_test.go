package e2b

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Exec says what it is told and what the sandbox has been, and does what the command's first word is: fail, end, hang.
func (f *fakeEngine) Exec(ctx context.Context, team, id, line string, out func(lifecycle.Output)) (exit lifecycle.Exit, err error) {
	var env map[string]string
	if err := f.change(team, id, func(sb *lifecycle.Sandbox) error { env = sb.Env; return nil }, "exec", line); err != nil {
		return exit, err
	}
	out(lifecycle.Output{Bytes: fmt.Appendf(nil, "%s %v", line, env)})
	out(lifecycle.Output{Stderr: true, Bytes: []byte("warned\n")})
	switch what, _, _ := strings.Cut(line, " "); what {
	case "fail":
		return lifecycle.Exit{Code: 3, Status: "exit status 3"}, nil
	case "end":
		return exit, errdefs.ErrUnavailable.WithMessage("the machine has ended")
	case "hang":
		<-ctx.Done()
		return exit, context.Cause(ctx)
	}
	return exit, nil
}

func (f *fakeEngine) Metrics(_ context.Context, team, id string, from, to time.Time) (all []lifecycle.Metric, err error) {
	err = f.change(team, id, func(*lifecycle.Sandbox) error {
		for i := range 3 {
			all = append(all, lifecycle.Metric{At: f.began.Add(time.Duration(i) * 5 * time.Second), CPUs: 2, CPUUsedPercent: 12.5, MemUsed: 100, MemTotal: 1 << 30, DiskUsed: 5, DiskTotal: 1 << 33})
		}
		return nil
	}, "metrics", from.Unix(), to.Unix())
	return all, err
}

func (f *fakeEngine) Logs(_ context.Context, team, id string, q lifecycle.LogQuery) (all []lifecycle.LogEntry, err error) {
	err = f.change(team, id, func(*lifecycle.Sandbox) error {
		all = []lifecycle.LogEntry{{At: f.began, Message: "it is \"up\"", Level: lifecycle.Info, Fields: map[string]string{"pid": "7"}}, {At: f.began, Message: "hm", Level: lifecycle.Warn}}
		return nil
	}, "logs", q.From.UnixMilli(), q.Backward, q.Limit, q.Level, q.Search)
	return all, err
}

// FollowLog has what Logs has, and then ends with follow when changes is closed.
func (f *fakeEngine) FollowLog(ctx context.Context, team, id string, from lifecycle.LogStart, follow bool, each func(lifecycle.LogEntry) error) error {
	all, err := f.Logs(ctx, team, id, lifecycle.LogQuery{Limit: from.Tail})
	if err != nil {
		return err
	}
	for i, e := range all {
		if e.Place = fmt.Sprint("place-", i); e.Place <= from.After {
			continue
		}
		if err := each(e); err != nil {
			return err
		}
	}
	if follow {
		<-f.changes
	}
	return ctx.Err()
}

// Capacity has room for as many of a shape as that has vCPUs.
func (f *fakeEngine) Capacity(team string, shapes []admission.Shape) (lifecycle.Capacity, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked("capacity", team, shapes); err != nil {
		return lifecycle.Capacity{}, err
	}
	c := lifecycle.Capacity{
		Reading:  admission.Reading{CPUs: 4, MemoryTotal: 1000, MemoryAvailable: 400, DiskTotal: 2000, DiskFree: 1500, Pressure: admission.Pressure{CPU: 12.5, Known: true}},
		CPUsUsed: 1.5, Total: admission.Amount{MilliCPU: 4000, Memory: 900, Disk: 2000}, Reserved: admission.Amount{MilliCPU: 3500, Memory: 100, Disk: 50},
		Spare: admission.Amount{MilliCPU: 500, Memory: 10, Disk: 5}, Running: 7, Paused: 3,
		Use: admission.Use{Running: 2, Paused: 1, VCPUs: 4, Memory: 60, Disk: 30}, Limits: config.Limits{Running: 5},
	}
	for _, s := range shapes {
		c.Rooms = append(c.Rooms, lifecycle.Room{Reserved: admission.Amount{MilliCPU: 250, Memory: 96, Disk: 8}, Count: s.VCPUs, Short: admission.ReasonCPU})
	}
	return c, nil
}

// Watch tells of what is sent to changes, after all that there is.
func (f *fakeEngine) Watch(ctx context.Context, team string, each func(lifecycle.Change) error) error {
	f.mu.Lock()
	c := lifecycle.Change{Full: true}
	for _, sb := range f.boxes {
		if sb.Team == team {
			c.Sandboxes = append(c.Sandboxes, *sb)
		}
	}
	err := f.asked("watch", team)
	f.mu.Unlock()
	for err == nil {
		if err = each(c); err != nil {
			break
		}
		select {
		case c = <-f.changes:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return err
}
