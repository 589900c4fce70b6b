package stack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/e2b"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/keeper"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/templates"
	"github.com/cubesandbox/cube/orchestrator/tracing"
)

// traceTimeout bounds how long the end of the stack waits for its last traces to be sent.
const traceTimeout = 3 * time.Second

// openSandboxes has the engine of E2B's sandboxes go on where the one before has ended.
func (s *stack) openSandboxes(ctx context.Context) (err error) {
	c, err := sandbox.Connect(ctx, s.cfg)
	if err != nil {
		return err
	}
	s.undo.Push(c.Close)
	if s.db, err = db.Open(ctx, s.cfg.DatabaseFile()); err != nil {
		return err
	}
	s.undo.Push(s.db.Close)
	stopTraces, err := tracing.Start(ctx, s.cfg.API.Traces, s.Version, s.Log.With("part", "traces"))
	if err != nil {
		return err
	}
	s.undo.Push(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout(traceTimeout))
		defer cancel()
		if err := stopTraces(ctx); err != nil {
			s.Log.Warn("traces are lost", "error", err) // which is no failure of the stack's
		}
		return nil
	})
	log := s.Log.With("part", "sandboxes")
	m, g := machines.New(s.cfg, c, log), guests.New(s.cfg.Timeout)
	s.engine, err = lifecycle.New(ctx, s.db, m, g, s.cfg.SeedFile(), lifecycle.Options{
		Log: log, Timeout: s.cfg.Timeout, Since: s.since, MaxTimeout: time.Duration(s.cfg.API.MaxTimeout), MaxSandboxes: s.cfg.API.MaxSandboxes,
		SampleEvery: time.Duration(s.cfg.API.MetricsInterval),
	})
	if err != nil {
		return err
	}
	s.undo.Push(func() error { s.engine.Close(); return nil })
	s.api.OpenTemplates(&templates.Builder{Config: s.cfg, Client: c, Machines: m, Guests: g, Engine: s.engine})
	if err := s.engine.Open(ctx); err != nil {
		return err
	}
	s.board.SetProbe("sandboxes", func(context.Context) error { return s.engine.Ready() })
	return nil
}

// startProxy has the data plane serve, which goes on when the stack ends.
func (s *stack) startProxy(ctx context.Context) error {
	l, err := keeper.ListenRoutes(s.cfg)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: ingress.Handler(s.engine.Routes()), ReadHeaderTimeout: 5 * time.Second}
	s.group.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve the proxy's routes: %w", err)
		}
		return nil
	})
	s.group.Go(func() error {
		<-s.life.Done()
		return srv.Close()
	})
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	k, err := keeper.Start(ctx, s.cfg, exe, s.Log.With("part", "proxy"))
	if err != nil {
		return err
	}
	s.undo.Push(k.Close)
	s.group.Go(func() error { return k.Run(s.life) })
	s.proxy.Store(k)
	s.board.SetProbe("proxy", k.Probe)
	return nil
}

// serveE2B serves E2B's API, which tells clients what is being waited for until openE2B.
func (s *stack) serveE2B(ctx context.Context) error {
	most, err := mostConnections()
	if err != nil {
		return err
	}
	free, cancel := context.WithTimeout(ctx, s.cfg.Timeout(portTimeout))
	defer cancel()
	l, err := listenTCP(free, s.cfg.API.Listen.String())
	if err != nil {
		return fmt.Errorf("E2B API: %w; api.listen of the configuration is another address", err)
	}
	s.metrics = prometheus.NewRegistry()
	s.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.e2b = e2b.New(e2b.Options{
		Domain: s.cfg.Proxy.Authority(), MaxTimeout: time.Duration(s.cfg.API.MaxTimeout),
		Ready:   func(ctx context.Context) health.Report { return s.board.Report(ctx) },
		Awaited: s.board.Awaited,
		Metrics: s.metrics, MoreMetrics: prometheus.GathererFunc(s.proxyMetrics), MetricsFrom: s.cfg.API.MetricsFrom,
		MaxConnections: most, Log: s.Log.With("part", "api"), Timeout: s.cfg.Timeout,
	})
	// It tells clients that the stack is being stopped until all else is.
	s.undo.Push(s.e2b.Close)
	s.group.Go(func() error { return s.e2b.Serve(s.life, l) })
	return nil
}

// proxyMetrics are there when the proxy is.
func (s *stack) proxyMetrics() ([]*dto.MetricFamily, error) {
	if k := s.proxy.Load(); k != nil {
		return k.Gather()
	}
	return nil, nil
}

// openE2B has E2B's API do what it is asked for.
func (s *stack) openE2B(context.Context) error {
	s.metrics.MustRegister(s.engine)
	s.e2b.Open(s.engine, s.db, s.db)
	return nil
}
