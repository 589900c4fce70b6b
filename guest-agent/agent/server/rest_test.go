package server

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/agent/events"
	"github.com/cubesandbox/cube/guest-agent/api"
)

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func ok(context.Context) error { return nil }

// A freeze waits for changes that are under way, and changes wait for its end.
func TestFreezeAndChanges(t *testing.T) {
	g := &Guest{}
	var session turn
	ctx := testContext(t)
	call := func(ctx context.Context, method string, m func()) error {
		info := &ttrpc.UnaryServerInfo{FullMethod: "/cube.agent.v1.Agent/" + method}
		_, err := g.intercept(ctx, nil, info, func(context.Context, func(any) error) (any, error) { m(); return nil, nil })
		return err
	}
	inside, leave := make(chan struct{}), make(chan struct{})
	for range 2 {
		go func() { _ = call(ctx, "ExecProcess", func() { inside <- struct{}{}; <-leave }) }()
		<-inside
	}
	frozen, stopped := make(chan error), make(chan struct{})
	go func() {
		frozen <- g.rest.freeze(ctx, &session, 1, func(context.Context) error { close(stopped); return nil })
	}()
	for changesWait := false; !changesWait; { // from some moment on
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		err := call(short, "CreateContainer", func() {})
		cancel()
		if changesWait = status.Code(err) == codes.DeadlineExceeded; !changesWait && err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-stopped:
		t.Fatal("the freeze hasn't waited for what is under way")
	default:
	}
	if err := g.rest.freeze(ctx, &session, 2, ok); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a freeze beside another: %v", err)
	}
	leave <- struct{}{}
	leave <- struct{}{}
	if err := <-frozen; err != nil {
		t.Fatal(err)
	}
	if err := g.rest.freeze(ctx, &session, 3, ok); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a freeze after another: %v", err)
	}
	for _, method := range []string{"SignalProcess", "Stats", "AttachProcess", "Thaw"} {
		if err := call(ctx, method, func() {}); err != nil {
			t.Errorf("%s while frozen: %v", method, err)
		}
	}
	done := make(chan error)
	go func() { done <- call(ctx, "DeleteContainer", func() {}) }()
	for range 2 {
		if err := g.rest.thaw(ctx, &session, 1, ok); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		t.Errorf("a change after the thaw: %v", err)
	}
	if err := g.rest.freeze(ctx, &session, 4, ok); err != nil {
		t.Errorf("the next freeze: %v", err)
	}
}

// What a freeze has begun is over when it fails, runs out of time or is given up; one that comes after its thaw has no
// effect. Numbers are each session's own.
func TestFreezeFails(t *testing.T) {
	var r rest
	var session turn
	ctx := testContext(t)
	open := func(what string) {
		t.Helper()
		if err := r.gate.enter(ctx); err != nil {
			t.Fatalf("after %s: %v", what, err)
		}
		r.gate.leave()
	}
	broken := errors.New("broken")
	if err := r.freeze(ctx, &session, 1, func(context.Context) error { return broken }); err != broken {
		t.Errorf("got %v", err)
	}
	open("a failure")
	if err := r.gate.enter(ctx); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if err := r.freeze(short, &session, 2, ok); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "under way") {
		t.Errorf("got %v", err)
	}
	begun, result := make(chan struct{}), make(chan error, 1)
	go func() { result <- r.freeze(ctx, &session, 3, ok) }()
	for isBegun := false; !isBegun; time.Sleep(time.Millisecond) {
		r.mu.Lock()
		isBegun = r.underway != nil
		r.mu.Unlock()
	}
	if err := r.thaw(ctx, &session, 3, ok); err != nil {
		t.Fatal(err)
	}
	if err := <-result; !errors.Is(err, errGivenUp) {
		t.Errorf("the freeze that waits: %v", err)
	}
	r.gate.leave()
	open("a freeze that waited")
	go func() {
		result <- r.freeze(ctx, &session, 4, func(ctx context.Context) error {
			close(begun)
			<-ctx.Done()
			return context.Cause(ctx)
		})
	}()
	<-begun
	if err := r.thaw(ctx, &session, 4, ok); err != nil {
		t.Fatal(err)
	}
	if err := <-result; !errors.Is(err, errGivenUp) {
		t.Errorf("the freeze that stops: %v", err)
	}
	open("a freeze that stopped")
	if err := r.freeze(ctx, &session, 4, ok); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a freeze after its thaw: %v", err)
	}
	open("a late freeze")
	var other turn
	if err := r.freeze(ctx, &other, 1, ok); err != nil {
		t.Errorf("another session's: %v", err)
	}
	if err := r.thaw(ctx, &other, 0, func(context.Context) error { return broken }); err != broken {
		t.Errorf("got %v", err)
	}
	if err := r.gate.enter(short); err == nil {
		t.Error("a failed thaw lets changes go on")
	}
}

// Without an identity nothing goes on.
func TestThawNeedsIdentity(t *testing.T) {
	client, _ := serve(t, events.NewLog())
	if _, err := client.Thaw(testContext(t), &api.ThawRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("thaw before Configure: %v", err)
	}
}
