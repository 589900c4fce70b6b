package e2b

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// fakeEngine has sandboxes that are nothing but what is told of them.
type fakeEngine struct {
	mu        sync.Mutex
	boxes     map[string]*lifecycle.Sandbox
	snapshots []lifecycle.Snapshot
	made      int
	began     time.Time
	// last is what was asked for last, in words that tests compare.
	last any
	// fails is what everything fails with, unless it is nil.
	fails error
	// hold keeps a create until it is closed, unless it is nil; entered is told of it.
	hold, entered chan struct{}
	// changes are what Watch tells.
	changes chan lifecycle.Change
}

func newFakeEngine() *fakeEngine {
	return &fakeEngine{boxes: map[string]*lifecycle.Sandbox{}, changes: make(chan lifecycle.Change), began: time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)}
}

// asked is called by each method, with the lock held.
func (f *fakeEngine) asked(what string, args ...any) error {
	f.last = strings.TrimSpace(what + " " + fmt.Sprintln(args...))
	return f.fails
}

func (f *fakeEngine) find(team, id string) (*lifecycle.Sandbox, error) {
	if sb := f.boxes[id]; sb != nil && sb.Team == team {
		return sb, nil
	}
	return nil, errdefs.ErrNotFound.WithMessage("sandbox " + id + " not found")
}

func (f *fakeEngine) add(c lifecycle.Create) lifecycle.Sandbox {
	f.made++
	start := f.began.Add(time.Duration(f.made) * time.Second)
	sb := &lifecycle.Sandbox{
		ID: fmt.Sprintf("i%020d", f.made), Team: c.Team, TemplateID: "tplbase", Alias: c.Template, BuildID: "b", State: lifecycle.Running,
		StartedAt: start, EndAt: start.Add(c.Timeout), CPUs: 2, MemoryMB: 1024, DiskMB: 512, Metadata: c.Metadata, Env: c.Env,
		Network: c.Network, AllowInternet: c.AllowInternet, AutoPause: c.AutoPause, AutoPauseMemory: c.AutoPauseMemory,
		AutoResume: c.AutoResume, Secure: c.Secure, EnvdVersion: "0.6.13",
	}
	if c.Secure {
		sb.EnvdToken = "envd-secret"
	}
	if p := c.Network.AllowPublicTraffic; p != nil && !*p {
		sb.TrafficToken = "traffic-secret"
	}
	f.boxes[sb.ID] = sb
	return *sb
}

func (f *fakeEngine) Create(ctx context.Context, c lifecycle.Create) (lifecycle.Sandbox, error) {
	if f.hold != nil {
		f.entered <- struct{}{}
		select {
		case <-f.hold:
		case <-ctx.Done():
			return lifecycle.Sandbox{}, ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = c
	if f.fails != nil {
		return lifecycle.Sandbox{}, f.fails
	}
	if c.Template == "nope" {
		return lifecycle.Sandbox{}, db.Ref{Name: c.Template}.NotFound()
	}
	return f.add(c), nil
}

func (f *fakeEngine) Get(_ context.Context, team, id string) (lifecycle.Sandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked("get", team, id); err != nil {
		return lifecycle.Sandbox{}, err
	}
	sb, err := f.find(team, id)
	if err != nil {
		return lifecycle.Sandbox{}, err
	}
	return *sb, nil
}

func (f *fakeEngine) List(_ context.Context, team string, l lifecycle.Filter) (page []lifecycle.Sandbox, next lifecycle.Cursor, running int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = l
	if f.fails != nil {
		return nil, next, 0, f.fails
	}
	var all []lifecycle.Sandbox
	for _, sb := range f.boxes {
		fits := sb.Team == team && slices.Contains(l.States, sb.State.Shown()) && (l.Template == "" || l.Template == sb.Alias || l.Template == sb.TemplateID) && sb.StartedAt.After(l.StartedAfter)
		for k, v := range l.Metadata {
			fits = fits && sb.Metadata[k] == v
		}
		if fits {
			all = append(all, *sb)
			if sb.State.Shown() == lifecycle.Running {
				running++
			}
		}
	}
	order := func(a, b lifecycle.Sandbox) int {
		c := cmp.Or(a.StartedAt.Compare(b.StartedAt), cmp.Compare(a.ID, b.ID))
		if !l.Ascending {
			c = -c
		}
		return c
	}
	slices.SortFunc(all, order)
	for _, sb := range all {
		if l.After != (lifecycle.Cursor{}) && order(sb, lifecycle.Sandbox{ID: l.After.ID, StartedAt: l.After.At}) <= 0 {
			continue
		}
		if len(page) == l.Limit {
			last := page[len(page)-1]
			return page, lifecycle.Cursor{At: last.StartedAt, ID: last.ID}, running, nil
		}
		page = append(page, sb)
	}
	return page, lifecycle.Cursor{}, running, nil
}

// change does something to a sandbox that is there.
func (f *fakeEngine) change(team, id string, how func(*lifecycle.Sandbox) error, what string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked(what, append([]any{team, id}, args...)...); err != nil {
		return err
	}
	sb, err := f.find(team, id)
	if err != nil {
		return err
	}
	return how(sb)
}

func (f *fakeEngine) Kill(_ context.Context, team, id string) error {
	return f.change(team, id, func(*lifecycle.Sandbox) error { delete(f.boxes, id); return nil }, "kill")
}

func (f *fakeEngine) SetTimeout(_ context.Context, team, id string, d time.Duration) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error { sb.EndAt = f.began.Add(d); return nil }, "timeout", d)
}

func (f *fakeEngine) Refresh(_ context.Context, team, id string, d time.Duration) error {
	return f.change(team, id, func(*lifecycle.Sandbox) error { return nil }, "refresh", d)
}

func (f *fakeEngine) Connect(_ context.Context, team, id string, d time.Duration, memory *bool) (sb lifecycle.Sandbox, resumed bool, err error) {
	err = f.change(team, id, func(of *lifecycle.Sandbox) error {
		resumed, of.State = of.State == lifecycle.Paused, lifecycle.Running
		sb = *of
		return nil
	}, "connect", d, word(memory))
	return sb, resumed, err
}

func (f *fakeEngine) Resume(_ context.Context, team, id string, d time.Duration, memory *bool) (sb lifecycle.Sandbox, err error) {
	err = f.change(team, id, func(of *lifecycle.Sandbox) error {
		if of.State != lifecycle.Paused {
			return errdefs.ErrFailedPrecondition.WithMessage("sandbox " + id + " is running already")
		}
		of.State = lifecycle.Running
		sb = *of
		return nil
	}, "resume", d, word(memory))
	return sb, err
}

func (f *fakeEngine) Pause(_ context.Context, team, id string, memory bool) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error {
		if sb.State == lifecycle.Paused {
			return errdefs.ErrFailedPrecondition.WithMessage("sandbox " + id + " is paused already")
		}
		sb.State = lifecycle.Paused
		return nil
	}, "pause", memory)
}

// Fork has every third child fail.
func (f *fakeEngine) Fork(_ context.Context, team, id string, d time.Duration, n int) (children []lifecycle.ForkResult, err error) {
	err = f.change(team, id, func(sb *lifecycle.Sandbox) error {
		for i := range n {
			if i%3 == 2 {
				children = append(children, lifecycle.ForkResult{Err: errdefs.ErrResourceExhausted.WithMessage("no memory is left")})
				continue
			}
			children = append(children, lifecycle.ForkResult{Sandbox: f.add(lifecycle.Create{Team: team, Template: sb.Alias, Timeout: d, Secure: sb.Secure})})
		}
		return nil
	}, "fork", d, n)
	return children, err
}

func (f *fakeEngine) Snapshot(_ context.Context, team, id, name string) (s lifecycle.Snapshot, err error) {
	err = f.change(team, id, func(*lifecycle.Sandbox) error {
		s = lifecycle.Snapshot{ID: fmt.Sprintf("tplsnap%d:default", len(f.snapshots)), CreatedAt: f.began.Add(time.Duration(len(f.snapshots)) * time.Second)}
		if name != "" {
			s.ID = team + "/" + name + ":default"
			s.Names = []string{s.ID}
		}
		f.snapshots = append(f.snapshots, s)
		return nil
	}, "snapshot", name)
	return s, err
}

func (f *fakeEngine) Snapshots(_ context.Context, team string, l lifecycle.SnapshotFilter) (page []lifecycle.Snapshot, next lifecycle.Cursor, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = l
	for _, s := range slices.Backward(f.snapshots) {
		if l.After.ID != "" && !s.CreatedAt.Before(l.After.At) {
			continue
		}
		if len(page) == l.Limit {
			last := page[len(page)-1]
			return page, lifecycle.Cursor{At: last.CreatedAt, ID: last.ID}, f.fails
		}
		page = append(page, s)
	}
	return page, next, f.fails
}

func (f *fakeEngine) DeleteSnapshot(_ context.Context, team, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked("delete snapshot", team, id); err != nil {
		return err
	}
	i := slices.IndexFunc(f.snapshots, func(s lifecycle.Snapshot) bool { return s.ID == id })
	switch {
	case id == "base":
		return errdefs.ErrInvalidArgument.WithMessage("sandboxes are made of it")
	case i < 0:
		return errdefs.ErrNotFound.WithMessage("template '" + id + "' not found")
	}
	f.snapshots = slices.Delete(f.snapshots, i, i+1)
	return nil
}

func (f *fakeEngine) UpdateNetwork(_ context.Context, team, id string, n lifecycle.Network, allow *bool) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error {
		sb.Network.AllowOut, sb.Network.DenyOut, sb.AllowInternet = n.AllowOut, n.DenyOut, allow
		return nil
	}, "network", n.AllowOut, n.DenyOut, word(allow))
}

func (f *fakeEngine) Rollback(_ context.Context, team, id, snapshot string) error {
	return f.change(team, id, func(*lifecycle.Sandbox) error { return nil }, "rollback", snapshot)
}

func (f *fakeEngine) InitAgain(_ context.Context, team, id string, env map[string]string, request string) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error { sb.Env = env; return nil }, "init", env, request)
}

func word(b *bool) string {
	if b == nil {
		return "-"
	}
	return fmt.Sprint(*b)
}
