package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/e2b"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// listed is how many paused sandboxes there are to list.
const listed = 10_000

// asleep are machines that are all paused, which takes none.
type asleep struct {
	lifecycle.Machines
	all map[string]lifecycle.Seen
}

func (a asleep) All(context.Context) (map[string]lifecycle.Seen, error) { return a.all, nil }

func (a asleep) Look(_ context.Context, id string) (lifecycle.Seen, error) { return a.all[id], nil }

// Read and CPUUsed are of a host that nothing is started on.
func (asleep) Read() (admission.Reading, error) { return admission.Reading{}, nil }

func (asleep) CPUUsed() (float64, error) { return 0, nil }

func (asleep) Sweep(context.Context) error { return nil }

func (asleep) Watch(ctx context.Context, ready func(), _ func(string)) error {
	ready()
	<-ctx.Done()
	return ctx.Err()
}

// lists measures pages of a list of many paused sandboxes, by HTTP: the API, engine and database without machines.
func lists(ctx context.Context, n int) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	address, key, err := listServer(ctx, &u)
	if err != nil {
		return err
	}
	ask := func(query string, want int) (time.Duration, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/v2/sandboxes"+query, nil)
		if err != nil {
			return 0, err
		}
		req.Header.Set("X-API-KEY", key)
		began := time.Now()
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		took := time.Since(began)
		var page []json.RawMessage
		if err := errors.Join(err, json.Unmarshal(body, &page)); err != nil || len(page) != want {
			return 0, fmt.Errorf("GET %s: %s, %d sandboxes: %w", req.URL, resp.Status, len(page), err)
		}
		return took, nil
	}
	fmt.Printf("\n## A list of %d paused sandboxes, by HTTP\n\n| | p50 ms | p95 ms |\n| --- | --- | --- |\n", listed)
	for _, c := range []struct {
		name, query string
		want        int
	}{{"the first page, of 100", "", 100}, {"the one of them that has a certain metadata", "?metadata=k%3Di0000000000000000042", 1}} {
		var s sample
		for range 10 * n {
			took, err := ask(c.query, c.want)
			if err != nil {
				return err
			}
			s = append(s, took)
		}
		fmt.Println(s.fineRow(c.name))
	}
	return nil
}

// listServer serves the API of a database that has those sandboxes.
func listServer(ctx context.Context, u *undo.Stack) (address, key string, err error) {
	dir, err := os.MkdirTemp("", "cube-bench-")
	if err != nil {
		return "", "", err
	}
	u.Push(func() error { return os.RemoveAll(dir) })
	d, err := db.Open(ctx, filepath.Join(dir, "cube.db"))
	if err != nil {
		return "", "", err
	}
	u.Push(d.Close)
	if key, err = d.CreateKey(ctx, db.DefaultTeam); err != nil {
		return "", "", err
	}
	if err := d.BeginBuild(ctx, db.Build{ID: "build", Snapshot: "snapshot", CreatedAt: time.Now(), CPUs: 2, MemoryMB: 512, DiskMB: 512}); err != nil {
		return "", "", err
	}
	template, err := d.Publish(ctx, db.Publication{Build: "build", Team: db.DefaultTeam, Name: "base", Template: "base", Tag: db.DefaultTag})
	if err != nil {
		return "", "", err
	}
	a := asleep{all: map[string]lifecycle.Seen{}}
	began := time.Now().Add(-listed * time.Second)
	for i := range listed {
		id := fmt.Sprintf("i%019d", i)
		a.all[id] = lifecycle.Seen{State: lifecycle.Still}
		err := d.AddSandbox(ctx, db.Sandbox{ID: id, Team: db.DefaultTeam, Template: template, Build: "build", State: string(lifecycle.Paused),
			StartedAt: began.Add(time.Duration(i) * time.Second), Metadata: map[string]string{"k": id}, Spec: json.RawMessage("{}")})
		if err != nil {
			return "", "", err
		}
	}
	log := slog.New(slog.DiscardHandler)
	engine, err := lifecycle.New(ctx, d, a, nil, filepath.Join(dir, "seed"), lifecycle.Options{Log: log, Host: a})
	if err != nil {
		return "", "", err
	}
	u.Push(func() error { engine.Close(); return nil })
	if err := engine.Open(ctx); err != nil {
		return "", "", err
	}
	api := e2b.New(e2b.Options{Domain: "sandbox.localhost", Metrics: prometheus.NewRegistry(), Log: log,
		Ready:   func(context.Context) health.Report { return health.Report{Ready: true} },
		Timeout: func(d time.Duration) time.Duration { return d }})
	api.Open(engine, d, d, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", err
	}
	ctx, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- api.Serve(ctx, l) }()
	u.Push(func() error { stop(); return <-served })
	return l.Addr().String(), key, nil
}
