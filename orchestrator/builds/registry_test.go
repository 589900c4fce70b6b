package builds

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// carrier is a registry with one template.
type carrier struct {
	has    templates.Artefact
	pushed []string
	wait   chan struct{} // a push waits for it, unless it is nil
}

func (c *carrier) Look(_ context.Context, from string, r *templates.Registry) (templates.Artefact, error) {
	switch {
	case from == "r.example/secret:1" && (r == nil || r.Password != "password"):
		return templates.Artefact{}, errdefs.ErrPermissionDenied.WithMessage("not for you")
	case from == "r.example/none:1":
		return templates.Artefact{}, errdefs.ErrNotFound.WithMessage("the registry doesn't have it")
	}
	return c.has, nil
}

func (c *carrier) Push(ctx context.Context, of db.Build, to string, _ *templates.Registry, tell registry.Report) (string, error) {
	tell("half of it")
	if c.wait != nil {
		select {
		case <-c.wait:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	c.pushed = append(c.pushed, of.ID+" to "+to)
	return to + "@sha256:1", nil
}

const pinnedName = "r.example/app@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func newCarrier(s *stand) *carrier {
	c := &carrier{has: templates.Artefact{Name: pinnedName, Settings: db.Settings{User: "me", Run: "serve", Ready: "true"}, CPUs: 4, MemoryMB: 256, DiskMB: 512}}
	s.Carrier = c
	return c
}

// A pull is a build of what the registry has at that moment, with what that takes.
func TestPull(t *testing.T) {
	s := newStand(t)
	c := newCarrier(s)
	made, err := s.Pull(t.Context(), PullRequest{Team: "blue", From: "r.example/app:1", Name: "app:v2", Public: true}, nil)
	s.must(err)
	s.let("", fine)
	b, _ := s.ended(made)
	if b.State != db.JobReady || b.CPUs != 4 || b.MemoryMB != 256 || b.Plan.Artefact != pinnedName || b.Plan.User != "me" || b.Plan.Run != "serve" || !made.Public || made.Tags[0] != "v2" {
		t.Errorf("%+v, %+v", made, b)
	}
	if why, err := s.Outdated(t.Context(), b); why != "" || err != nil {
		t.Errorf("outdated: %s, %v", why, err)
	}
	if _, err := s.Rebuild(t.Context(), "blue", db.Ref{Name: "app", Tag: "v2"}, false); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), pinnedName) {
		t.Errorf("rebuilt: %v", err)
	}
	for what, r := range map[string]struct {
		PullRequest
		is func(error) bool
	}{
		"no such thing":    {PullRequest{Team: "blue", From: "r.example/none:1", Name: "x"}, errdefs.IsNotFound},
		"not for everyone": {PullRequest{Team: "blue", From: "r.example/secret:1", Name: "x"}, errdefs.IsPermissionDenied},
		"no name":          {PullRequest{Team: "blue", From: "r.example/app:1", Name: "X y"}, errdefs.IsInvalidArgument},
		"another team's":   {PullRequest{Team: "blue", From: "r.example/app:1", Name: "green/x"}, errdefs.IsInvalidArgument},
	} {
		if _, err := s.Pull(t.Context(), r.PullRequest, nil); !r.is(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	c.has.Settings.User = "no user"
	if _, err := s.Pull(t.Context(), PullRequest{Team: "blue", From: "r.example/app:1", Name: "x"}, nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a user that can't be one: %v", err)
	}
	c.has.Settings.User, c.has.MemoryMB = "me", 64
	if _, err := s.Pull(t.Context(), PullRequest{Team: "blue", From: "r.example/app:1", Name: "x"}, nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a size that can't be: %v", err)
	}
	if _, err := s.db.Template(t.Context(), "blue", db.Ref{Name: "x"}); !errdefs.IsNotFound(err) {
		t.Errorf("what was refused has left a template: %v", err)
	}
}

// A push is of the team's own, of built ones alone, and ends with its client and the service.
func TestPush(t *testing.T) {
	s := newStand(t)
	c := newCarrier(s)
	made, err := s.Ask(t.Context(), Request{Team: "blue", Name: "app", Public: true}, Plan{Image: "a"})
	s.must(err)
	s.let("a", fine)
	s.ended(made)
	saved, err := s.engine.Snapshot(t.Context(), "blue", "box", "")
	s.must(err)
	of, err := db.ParseRef(saved.ID)
	s.must(err)

	told := ""
	at, err := s.Push(t.Context(), "blue", db.Ref{Name: "app"}, "r.example/app:1", nil, func(m string) { told += m })
	if err != nil || at != "r.example/app:1@sha256:1" || len(c.pushed) != 1 || c.pushed[0] != made.Build+" to r.example/app:1" || told != "half of it" {
		t.Errorf("%s, %v, %q, %v", at, c.pushed, told, err)
	}
	silent := func(string) {}
	if _, err := s.Push(t.Context(), "green", db.Ref{Team: "blue", Name: "app"}, "r", nil, silent); !errdefs.IsPermissionDenied(err) {
		t.Errorf("another team's: %v", err)
	}
	if _, err := s.Push(t.Context(), "blue", db.Ref{Name: "app", Tag: "none"}, "r", nil, silent); !errdefs.IsNotFound(err) {
		t.Errorf("a tag that isn't there: %v", err)
	}
	if _, err := s.Push(t.Context(), "blue", of, "r", nil, silent); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a snapshot of a sandbox: %v", err)
	}
	c.wait = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := s.Push(ctx, "blue", db.Ref{Name: "app"}, "r", nil, func(string) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	begun, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := s.Push(t.Context(), "blue", db.Ref{Name: "app"}, "r", nil, func(string) { close(begun) })
		ended <- err
	}()
	<-begun
	s.Close()
	if err := <-ended; !errdefs.IsUnavailable(err) {
		t.Errorf("the service has ended: %v", err)
	}
	s.engine.mu.Lock()
	defer s.engine.mu.Unlock()
	if s.engine.kept != 0 {
		t.Errorf("%d builds are kept", s.engine.kept)
	}
}
