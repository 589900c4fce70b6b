package lifecycle

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

func TestCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{MaxTimeout: 24 * time.Hour})
		defer s.stop()
		sb := s.create(func(c *Create) { c.Network.AllowOut = []string{"1.1.1.1"} })
		if sb.State != Running || sb.TemplateID != "tbase" || sb.Alias != "base" || sb.EndAt.Sub(sb.StartedAt) != time.Hour || sb.EnvdVersion != "0.6.13" || sb.MemoryMB != 512 {
			t.Errorf("made %+v", sb)
		}
		if len(sb.ID) != 21 || sb.ID[0] != 'i' || len(sb.EnvdToken) != 64 || sb.TrafficToken != "" {
			t.Errorf("id %s, tokens %q and %q", sb.ID, sb.EnvdToken, sb.TrafficToken)
		}
		m := s.machine(sb.ID)
		if len(m.told) != 1 || m.told[0].SandboxID != sb.ID || m.told[0].Token != sb.EnvdToken || m.told[0].Env["X"] != "1" || m.told[0].User != "user" {
			t.Errorf("envd was told %+v", m.told)
		}
		if len(m.hooked) != 1 || m.hooked[0].Event != "create" || m.hooked[0].SandboxID != sb.ID || m.hooked[0].TemplateID != "tbase" || m.hooked[0].RequestID == "" || m.hooked[0].Metadata["a"] != "b" {
			t.Errorf("the hook was told %+v", m.hooked)
		}
		if !slices.Equal(m.started, []string{"serve"}) {
			t.Errorf("started %q", m.started)
		}
		for name, c := range map[string]struct {
			change func(*Create)
			is     func(error) bool
		}{
			"unknown template":     {func(c *Create) { c.Template = "nosuch" }, errdefs.IsNotFound},
			"unknown tag":          {func(c *Create) { c.Template = "base:v9" }, errdefs.IsNotFound},
			"not a template":       {func(c *Create) { c.Template = "../../etc" }, errdefs.IsInvalidArgument},
			"longer than possible": {func(c *Create) { c.Timeout = 25 * time.Hour }, errdefs.IsInvalidArgument},
		} {
			create := Create{Team: team, Template: "base", Timeout: time.Hour}
			c.change(&create)
			if _, err := s.Create(t.Context(), create); !c.is(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := s.Get(t.Context(), "blue", sb.ID); !errdefs.IsNotFound(err) {
			t.Errorf("another team's: %v", err)
		}
		for name, f := range map[string]func() error{
			"kill":    func() error { return s.Kill(t.Context(), "blue", sb.ID) },
			"pause":   func() error { return s.Pause(t.Context(), "blue", sb.ID, true) },
			"timeout": func() error { return s.SetTimeout(t.Context(), "blue", sb.ID, 0) },
		} {
			if err := f(); !errdefs.IsNotFound(err) {
				t.Errorf("another team's %s: %v", name, err)
			}
		}
		must(t, s.Kill(t.Context(), team, sb.ID))
		if _, err := s.Get(t.Context(), team, sb.ID); !errdefs.IsNotFound(err) || len(s.host.machines) != 0 {
			t.Errorf("after the kill: %v, %d machines", err, len(s.host.machines))
		}
		if err := s.Kill(t.Context(), team, sb.ID); !errdefs.IsNotFound(err) {
			t.Errorf("killed twice: %v", err)
		}
	})
}

// TestCreateFails: what can't be made leaves nothing, and its error says why.
func TestCreateFails(t *testing.T) {
	for _, call := range []string{"create", "init", "hook", "start"} {
		for _, how := range []string{"error", "hangs", "client goes"} {
			t.Run(call+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newStand(t, Options{})
					defer s.stop()
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					s.host.luck(func(ctx context.Context, c, _ string, after bool) error {
						if c != call || after {
							return nil
						}
						switch how {
						case "hangs":
							<-ctx.Done()
							return context.Cause(ctx)
						case "client goes":
							cancel()
							<-ctx.Done()
							return context.Cause(ctx)
						}
						return errFake
					})
					began := time.Now()
					_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
					if err == nil || call == "hook" && !strings.Contains(err.Error(), "init hook of its template, port 8080, path /who") {
						t.Errorf("the error is %v", err)
					}
					if took := time.Since(began); took > createTimeout+time.Minute || how != "hangs" && took > 2*time.Second {
						t.Errorf("it took %v", took)
					}
					if n, err := s.db.CountSandboxes(t.Context(), db.Filter{Team: team, States: []string{"creating", "running", "killing"}}); err != nil || n != 0 || len(s.host.machines) != 0 {
						t.Errorf("%d rows, %d machines, %v are left", n, len(s.host.machines), err)
					}
				})
			})
		}
	}
}

// TestSlowHook: a hook that takes its time keeps nobody else waiting.
func TestSlowHook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 1})
		defer s.stop()
		slow := make(chan struct{})
		hooks := 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "hook" && !after {
				if hooks++; hooks == 1 {
					<-slow
				}
			}
			return nil
		})
		done := make(chan error, 1)
		go func() {
			_, err := s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour})
			done <- err
		}()
		pass(5 * time.Second)
		began := time.Now()
		s.create(nil)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		close(slow)
		must(t, <-done)
	})
}

// amid is a host where something happens while a sandbox is let in: its build has been found then, and it has no row yet.
type amid struct {
	room
	do func() // nil: nothing
}

func (h *amid) Read() (admission.Reading, error) {
	if do := h.do; do != nil {
		h.do = nil
		do()
	}
	return h.room.Read()
}

// TestBuiltAnew: a template that is built anew while a create is under way is no reason for that to fail; one that is deleted is.
func TestBuiltAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &amid{room: room{Reading: admission.Reading{CPUs: 100, MemoryTotal: 1 << 40, MemoryAvailable: 1 << 40, DiskTotal: 1 << 40, DiskFree: 1 << 40}}}
		s := newStand(t, Options{Host: h})
		defer s.stop()
		ctx := t.Context()
		pass(time.Second)
		h.do = func() {
			snapshot, done, err := s.Begin(ctx, db.Build{ID: "second", Team: team, CreatedAt: time.Now(), CPUs: 1, MemoryMB: 256, DiskMB: 512, Settings: db.Settings{EnvdVersion: "0.6.13"}})
			must(t, err)
			s.host.mu.Lock()
			s.host.snapshots[snapshot] = true
			s.host.mu.Unlock()
			_, err = s.db.Publish(ctx, db.Publication{Build: "second", Team: team, Name: "base", Tag: db.DefaultTag})
			must(t, err)
			done()
			must(t, s.sweepNow(ctx))
		}
		if sb := s.create(nil); sb.BuildID != "second" || sb.MemoryMB != 256 {
			t.Errorf("made %+v", sb)
		}
		s.snap(s.create(nil).ID, "mine")
		h.do = func() {
			must(t, s.db.DeleteTemplate(ctx, team, db.Ref{Name: "mine"}))
			must(t, s.sweepNow(ctx))
		}
		if _, err := s.Create(ctx, Create{Team: team, Template: "mine", Timeout: time.Hour}); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "template 'mine' not found") {
			t.Errorf("of a template that is deleted meanwhile: %v", err)
		}
		if n := len(s.host.machines); n != 2 {
			t.Errorf("%d machines", n)
		}
	})
}
