// Package health tells two things apart: a daemon that is alive (/healthz) and one whose dependencies can be used
// (/readyz). It knows the dependencies by name only.
package health

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// State is where a dependency stands.
type State string

// The states of a dependency.
const (
	Starting State = "starting"
	Ready    State = "ready"
	Failed   State = "failed"
)

// Dependency is one line of a report.
type Dependency struct {
	Name   string `json:"name"`
	State  State  `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// Report is the answer of /readyz.
type Report struct {
	Ready        bool         `json:"ready"`
	Version      string       `json:"version"`
	PID          int          `json:"pid"`
	Dependencies []Dependency `json:"dependencies"`
}

// Missing names what isn't ready, with the reasons.
func (r Report) Missing() []string {
	var out []string
	for _, d := range r.Dependencies {
		if d.State != Ready {
			s := d.Name + ": " + string(d.State)
			if d.Reason != "" {
				s += " (" + d.Reason + ")"
			}
			out = append(out, s)
		}
	}
	return out
}

// Probe asks a dependency whether it can be used at this moment.
type Probe func(context.Context) error

// Board holds the state of each dependency. All methods may be called from many goroutines.
type Board struct {
	version string
	pid     int
	timeout time.Duration

	mu      sync.Mutex
	entries []entry
}

type entry struct {
	Dependency
	probe Probe
}

// NewBoard makes a board on which every dependency is starting. Each probe of a report may take at most timeout.
func NewBoard(version string, pid int, timeout time.Duration, names ...string) *Board {
	b := &Board{version: version, pid: pid, timeout: timeout}
	for _, n := range names {
		b.entries = append(b.entries, entry{Dependency: Dependency{Name: n, State: Starting}})
	}
	return b
}

// Set changes the state of a dependency. A name that isn't on the board is a programming error.
func (b *Board) Set(name string, s State, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.find(name)
	e.State, e.Reason = s, reason
}

// SetProbe has every report ask p while the dependency is ready.
func (b *Board) SetProbe(name string, p Probe) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.find(name).probe = p
}

func (b *Board) find(name string) *entry {
	i := slices.IndexFunc(b.entries, func(e entry) bool { return e.Name == name })
	if i < 0 {
		panic("health: no dependency " + name)
	}
	return &b.entries[i]
}

// Awaited is the first dependency that isn't ready as far as is known without asking any, "" if all are. It is cheap.
func (b *Board) Awaited() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.entries {
		if e.State != Ready {
			return e.Name
		}
	}
	return ""
}

// Report asks every ready dependency that has a probe, all at once, and says how things stand.
func (b *Board) Report(ctx context.Context) Report {
	b.mu.Lock()
	entries := slices.Clone(b.entries)
	b.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	var wg sync.WaitGroup
	for i := range entries {
		e := &entries[i]
		if e.State != Ready || e.probe == nil {
			continue
		}
		wg.Go(func() {
			if err := e.probe(ctx); err != nil {
				e.State, e.Reason = Failed, err.Error()
			}
		})
	}
	wg.Wait()

	r := Report{Ready: true, Version: b.version, PID: b.pid}
	for _, e := range entries {
		r.Ready = r.Ready && e.State == Ready
		r.Dependencies = append(r.Dependencies, e.Dependency)
	}
	return r
}

// Handler serves /healthz, which answers 200 as long as the process serves at all, and /readyz, which answers the report
// with 200 or 503.
func Handler(b *Board) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, req *http.Request) {
		r := b.Report(req.Context())
		w.Header().Set("Content-Type", "application/json")
		if !r.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		_ = enc.Encode(r) // the client has gone away
	})
	return mux
}
