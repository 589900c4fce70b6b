// Package bench measures what users of a server that speaks E2B's API wait for, by that API and by envd alone: it needs a key and
// nothing else of the server. What it makes there it removes, however it ends.
package bench

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// What can be measured, in the order in which it is.
const (
	Create   = "create" // and the kills that follow
	Exec     = "exec"
	Snapshot = "snapshot"
	Fork     = "fork"
	Pause    = "pause" // and the resumes that follow
)

// Operations are all of them.
var Operations = []string{Create, Exec, Snapshot, Fork, Pause}

// Options say what is measured.
type Options struct {
	Template string
	// Operations are some of those that there are.
	Operations []string
	// Count is how often each is done, Concurrency how many at once; both above 0.
	Count, Concurrency int
	// Command is the line that is executed.
	Command string
	// Answered: what makes or resumes a sandbox has taken until the API's answer, otherwise until envd's that follows.
	Answered bool
	// Say is told what is about to be measured.
	Say func(string)
}

// Report is what was measured.
type Report struct {
	Conditions Conditions `json:"conditions"`
	Rows       []Row      `json:"operations"`
}

// Conditions are what the figures depend on, as far as a client knows it.
type Conditions struct {
	API         string    `json:"api"`
	Template    string    `json:"template"`
	Count       int       `json:"count"`
	Concurrency int       `json:"concurrency"`
	Command     string    `json:"command"`
	Until       string    `json:"until"` // what has ended a create, fork or resume: "api" or "envd" has answered
	StartedAt   time.Time `json:"startedAt"`
	// Client is the system that this ran on, Load its load average of the last minute before, "" if it isn't known.
	Client string `json:"client"`
	Load   string `json:"load,omitempty"`
}

func conditions(api string, o Options) Conditions {
	c := Conditions{API: api, Template: o.Template, Count: o.Count, Concurrency: o.Concurrency, Command: o.Command, Until: "envd", StartedAt: time.Now().UTC(),
		Client: fmt.Sprintf("%s/%s, %d CPUs", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())}
	if o.Answered {
		c.Until = "api"
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		c.Load, _, _ = strings.Cut(string(load), " ")
	}
	return c
}

const (
	// life is how long the sandboxes live if nobody removes them.
	life = 30 * time.Minute
	// mark is of their metadata.
	mark = "cube-bench"
)

// run is one measurement, with what there is of it on the server.
type run struct {
	Options
	api *client.Client
	id  string

	mu        sync.Mutex
	boxes     map[string]bool
	snapshots map[string]bool
}

// Run measures. With an error, too, the report has what was measured until then; the error also says what couldn't be removed.
func Run(ctx context.Context, api *client.Client, o Options) (rep Report, err error) {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	r := &run{Options: o, api: api, id: hex.EncodeToString(id[:]), boxes: map[string]bool{}, snapshots: map[string]bool{}}
	rep.Conditions = conditions(api.Address(), o)
	defer func() {
		left := r.clean(ctx)
		if left != nil && ctx.Err() != nil { // who has interrupted it asks for no other error
			o.Say(left.Error())
		}
		err = errors.Join(err, left)
	}()
	for _, op := range Operations {
		if !slices.Contains(o.Operations, op) {
			continue
		}
		o.Say(fmt.Sprintf("%s: %d, %d at once", op, o.Count, o.Concurrency))
		rep.Rows = append(rep.Rows, r.measure(ctx, op)...)
		if ctx.Err() != nil {
			return rep, context.Cause(ctx)
		}
	}
	return rep, nil
}

func (r *run) measure(ctx context.Context, op string) []Row {
	if op == Create {
		return r.creates(ctx)
	}
	guests, err := r.prepare(ctx)
	defer r.killAll(ctx, guests)
	if len(guests) == 0 {
		s := newSample(op, 0)
		s.failed(err, r.Count)
		return []Row{s.row(0)}
	}
	switch op {
	case Exec:
		return r.repeat(ctx, len(guests), op, "", func(i int, first, _ *sample) {
			first.measure(func() error {
				code, err := guests[i].Exec(ctx, r.Command)
				if err == nil && code != 0 {
					err = fmt.Errorf("the command ended with %d", code)
				}
				return err
			})
		})
	case Snapshot:
		return r.repeat(ctx, len(guests), op, "", func(i int, first, _ *sample) { r.snapshot(ctx, guests[i], first) })
	case Fork:
		return r.repeat(ctx, len(guests), op, "", func(i int, first, _ *sample) { r.fork(ctx, guests[i], first) })
	}
	return r.repeat(ctx, len(guests), op, "resume", func(i int, first, second *sample) {
		id := guests[i].ID
		if first.measure(func() error { return r.api.Pause(ctx, id) }) != nil {
			return
		}
		second.measure(func() error {
			if err := r.api.Connect(ctx, id, life); err != nil {
				return err
			}
			return r.answers(ctx, guests[i])
		})
	})
}

// repeat has workers do something Count times in all, until ctx ends. What is measured second has no row without a name.
func (r *run) repeat(ctx context.Context, workers int, op, then string, do func(worker int, first, second *sample)) []Row {
	first, second := newSample(op, workers), newSample(then, workers)
	began := time.Now()
	turns := make(chan struct{}, r.Count)
	for range r.Count {
		turns <- struct{}{}
	}
	close(turns)
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			for range turns {
				if ctx.Err() != nil {
					return
				}
				do(i, first, second)
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	if then == "" {
		return []Row{first.row(took)}
	}
	return []Row{first.row(took), second.row(took)}
}

// creates measures creates, with as many sandboxes there as are made at once: each worker removes its one before it makes another.
func (r *run) creates(ctx context.Context) []Row {
	workers := min(r.Concurrency, r.Count)
	made := make([]*client.Guest, workers)
	kill := func(ctx context.Context, i int, s *sample) {
		g := made[i]
		if made[i] = nil; g != nil {
			s.measure(func() error { return r.kill(ctx, g.ID) })
		}
	}
	rows := r.repeat(ctx, workers, Create, "kill", func(i int, creates, kills *sample) {
		kill(ctx, i, kills)
		creates.measure(func() (err error) {
			made[i], err = r.create(ctx)
			return err
		})
	})
	r.killAll(ctx, slices.DeleteFunc(made, func(g *client.Guest) bool { return g == nil }))
	return rows
}

// prepare makes a sandbox for each worker. With fewer than that, err is why.
func (r *run) prepare(ctx context.Context) (guests []*client.Guest, err error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for range min(r.Concurrency, r.Count) {
		all.Go(func() {
			g, e := r.create(ctx)
			mu.Lock()
			defer mu.Unlock()
			if e != nil {
				err = e
				return
			}
			guests = append(guests, g)
		})
	}
	all.Wait()
	return guests, err
}
