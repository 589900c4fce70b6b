package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/agent/container"
	"github.com/cubesandbox/cube/guest-agent/agent/identity"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
)

// changes are the calls that a save of the machine must not find half done.
var changes = map[string]bool{
	"CreateContainer": true,
	"ExecProcess":     true,
	"StartContainer":  true,
	"PauseContainer":  true,
	"ResumeContainer": true,
	"UpdateContainer": true,
	"DeleteContainer": true,
}

// errGivenUp is why a freeze ends that its caller doesn't wait for any more.
var errGivenUp = fmt.Errorf("the host has given it up: %w", errdefs.ErrFailedPrecondition)

// rest says whether the work in the guest is at rest, for a save of the machine, or about to be. It outlasts sessions.
type rest struct {
	gate gate

	mu       sync.Mutex
	frozen   bool
	underway *freezing
}

type freezing struct {
	giveUp context.CancelCauseFunc
	done   chan struct{} // closed when it has succeeded, or all of it is undone
}

// turn is what a session knows of its freezes: those up to a number are over. rest.mu guards it.
type turn struct{ over uint64 }

// freeze calls stop with the gate closed. What stop has done is undone if it fails.
func (r *rest) freeze(ctx context.Context, t *turn, number uint64, stop func(context.Context) error) (err error) {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	f := &freezing{giveUp: giveUp, done: make(chan struct{})}
	if err := r.begin(f, t, number); err != nil {
		return err
	}
	defer func() {
		r.mu.Lock()
		r.underway, r.frozen = nil, err == nil
		r.mu.Unlock()
		close(f.done)
	}()
	if err := r.gate.close(ctx); err != nil {
		return err
	}
	if err := stop(ctx); err != nil {
		r.gate.open()
		return err
	}
	return nil
}

func (r *rest) begin(f *freezing, t *turn, number uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case number <= t.over:
		return fmt.Errorf("freeze %d: %w", number, errGivenUp)
	case r.frozen, r.underway != nil:
		return fmt.Errorf("the containers are at rest already: %w", errdefs.ErrFailedPrecondition)
	}
	r.underway = f
	return nil
}

// thaw gives a freeze up that is under way, or still to come, and calls resume. Then the gate is open.
func (r *rest) thaw(ctx context.Context, t *turn, number uint64, resume func(context.Context) error) error {
	r.mu.Lock()
	t.over = max(t.over, number)
	f := r.underway
	r.mu.Unlock()
	if f != nil {
		f.giveUp(errGivenUp)
		select {
		case <-f.done:
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of a freeze: %w", context.Cause(ctx))
		}
	}
	if err := resume(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.frozen {
		r.frozen = false
		r.gate.open()
	}
	return nil
}

// within calls change, which takes no time, while the work is at rest and stays so.
func (r *rest) within(change func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.frozen {
		return fmt.Errorf("the containers aren't at rest: %w", errdefs.ErrFailedPrecondition)
	}
	return change()
}

// admit has calls that change containers wait while the work is at rest.
func (g *Guest) admit(ctx context.Context, method string, m ttrpc.Method, unmarshal ttrpc.Unmarshaler) (any, error) {
	if changes[method] {
		if err := g.rest.gate.enter(ctx); err != nil {
			return nil, err
		}
		defer g.rest.gate.leave()
	}
	return m(ctx, unmarshal)
}

func (s *service) Freeze(ctx context.Context, r *api.FreezeRequest) (*emptypb.Empty, error) {
	return empty, s.rest.freeze(ctx, &s.turn, r.Number, func(ctx context.Context) (err error) {
		var u undo.Stack
		defer u.Run(&err)
		if err := s.Containers.Freeze(ctx); err != nil {
			return err
		}
		u.Push(func() error { return s.Containers.Thaw(context.WithoutCancel(ctx)) })
		return syncAll(ctx)
	})
}

// syncAll writes what file systems hold to the disks. One that doesn't come to an end isn't waited for.
func syncAll(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		unix.Sync()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write the file systems to the disks: %w", context.Cause(ctx))
	}
}

func (s *service) Thaw(ctx context.Context, r *api.ThawRequest) (*emptypb.Empty, error) {
	if !s.configured.Load() {
		return nil, errNoIdentity
	}
	return empty, s.rest.thaw(ctx, &s.turn, r.Number, func(ctx context.Context) error {
		// Last of all: the machine may have stood still for any time.
		if err := identity.CorrectClock(time.Unix(0, r.UnixNanos)); err != nil {
			return err
		}
		return s.Containers.Thaw(ctx)
	})
}

func (s *service) IdentifyContainer(_ context.Context, r *api.IdentifyContainerRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, s.rest.within(func() error {
		return c.Identify(container.Identity{Hostname: r.Hostname, MachineID: r.MachineId})
	})
}

func (s *service) AttachProcess(ctx context.Context, r *api.AttachProcessRequest) (*emptypb.Empty, error) {
	streams, err := s.streams(r.Stdio)
	if err != nil {
		return nil, err
	}
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		streams.Close()
		return nil, err
	}
	return empty, c.Attach(ctx, r.ExecId, streams, r.Stdio.GetTerminal(), r.GoesOn)
}
