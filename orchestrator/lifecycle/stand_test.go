package lifecycle

import (
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// room is a host that has so much.
type room struct {
	mu sync.Mutex
	admission.Reading
}

func (r *room) Read() (admission.Reading, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Reading, nil
}

func (r *room) CPUUsed() (float64, error) { return 0.5, nil }

// set changes what it has.
func (r *room) set(change func(*admission.Reading)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.Reading)
}

// stand is an engine with its database on a host.
type stand struct {
	*Engine
	t    *testing.T
	host *host
	path string
	o    Options
}

const team = "default"

// newStand makes an engine that is open, with template base.
func newStand(t *testing.T, o Options) *stand {
	t.Helper()
	s := &stand{t: t, host: newHost(), path: filepath.Join(t.TempDir(), "control", "cube.db"), o: o}
	d := s.database()
	_, err := d.CreateKey(t.Context(), team)
	must(t, err)
	_, err = d.CreateKey(t.Context(), "blue")
	must(t, err)
	must(t, d.BeginBuild(t.Context(), db.Build{ID: "build", Team: team, Snapshot: "base", CreatedAt: time.Now(), CPUs: 2, MemoryMB: 512, DiskMB: 1024,
		Settings: db.Settings{EnvdVersion: "0.6.13", User: "user", Hook: &db.Hook{Port: 8080, Path: "/who"}, Start: "serve"}}))
	_, err = d.Publish(t.Context(), db.Publication{Build: "build", Team: team, Name: "base", Template: "tbase", Tag: db.DefaultTag, Public: true})
	must(t, err)
	must(t, d.Close())
	s.boot()
	return s
}

func (s *stand) database() *db.DB {
	s.t.Helper()
	d, err := db.Open(s.t.Context(), s.path)
	must(s.t, err)
	return d
}

// boot makes another engine of the database, in place of one that has died or was closed.
func (s *stand) boot() {
	s.t.Helper()
	o := s.o
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Host == nil {
		o.Host = &room{Reading: admission.Reading{CPUs: 1 << 10, MemoryTotal: 1 << 40, MemoryAvailable: 1 << 40, DiskTotal: 1 << 40, DiskFree: 1 << 40}}
	}
	d := s.database()
	e, err := New(s.t.Context(), d, s.host, s.host, filepath.Join(filepath.Dir(s.path), "seed"), o)
	must(s.t, err)
	s.Engine = e
	must(s.t, e.Open(s.t.Context()))
}

// stop closes the engine and its database.
func (s *stand) stop() {
	s.t.Helper()
	s.Close()
	must(s.t, s.db.Close())
}

// make makes a sandbox that lives for an hour.
func (s *stand) create(change func(*Create)) Sandbox {
	s.t.Helper()
	c := Create{Team: team, Template: "base", Timeout: time.Hour, AutoPauseMemory: true, Secure: true, Metadata: map[string]string{"a": "b"}, Env: map[string]string{"X": "1"}}
	if change != nil {
		change(&c)
	}
	sb, err := s.Create(s.t.Context(), c)
	must(s.t, err)
	return sb
}

func (s *stand) state(id string) State {
	b, r, err := s.find("", id)
	if err != nil || b == nil {
		return gone
	}
	return r.State
}

func (s *stand) machine(id string) machine {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if m := s.host.machines[id]; m != nil {
		return *m
	}
	return machine{}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pass has time pass, and all happen that happens until then.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}
