package stack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"time"

	"github.com/docker/go-units"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/builds"
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
	host := admission.NewProc(s.cfg)
	s.engine, err = lifecycle.New(ctx, s.db, m, g, s.cfg.SeedFile(), lifecycle.Options{
		Log: log, Timeout: s.cfg.Timeout, Since: s.since, MaxTimeout: time.Duration(s.cfg.API.MaxTimeout),
		SampleEvery: time.Duration(s.cfg.API.MetricsInterval), Admission: &s.cfg.Admission, Limits: &s.cfg.Limits, Host: host,
		Pool:  lifecycle.PoolOptions{MaxMemory: int64(s.cfg.Pool.MaxMemory), MaxPerTemplate: s.cfg.Pool.MaxPerTemplate, Pressed: host.Pressed},
		Audit: s.audit, Kept: s.kept(), Images: s.images(m),
	})
	if err != nil {
		return err
	}
	s.undo.Push(func() error { s.engine.Close(); return nil })
	builder := &templates.Builder{
		Config: s.cfg, Machines: m, Guests: g, Layers: s.db, Room: s.engine, Store: m, Fits: s.launcher.Fits, Log: s.Log.With("part", "templates"), Version: s.Version,
	}
	if err := builder.Open(ctx); err != nil {
		log.Warn("what builds of before have left can't all be removed", "error", err)
	}
	if err := s.engine.Open(ctx); err != nil {
		return err
	}
	if err := s.openBuilds(ctx, builder, c); err != nil {
		return err
	}
	s.openTeams(m, builder)
	s.board.SetProbe("sandboxes", func(context.Context) error { return s.engine.Ready() })
	return nil
}

// openBuilds has templates be built, which go on in their order if they were waiting for their turn.
func (s *stack) openBuilds(ctx context.Context, b *templates.Builder, c *sandbox.Client) error {
	t := s.cfg.Templates
	uploads, err := builds.OpenUploads(s.cfg.UploadDir(), int64(t.MaxUpload), int64(t.Uploads))
	if err != nil {
		return err
	}
	cpus := s.cfg.VM.MaxVCPUs
	if cpus == 0 {
		cpus = runtime.NumCPU()
	}
	s.builds = builds.New(s.db, s.engine, b, uploads, builds.Options{
		Log: s.Log.With("part", "templates"), Audit: s.audit, Timeout: s.cfg.Timeout, Concurrency: t.Concurrency, Limits: &s.cfg.Limits,
		MaxCPUs: cpus, MaxMemoryMB: int(s.cfg.VM.MaxMemory / units.MiB), DiskMB: int(s.cfg.Store.DiskSize / units.MiB), Carrier: b, Version: b.Version, Digest: c.Digest,
	})
	s.undo.Push(func() error { s.builds.Close(); return nil })
	if err := s.builds.Open(ctx); err != nil {
		return err
	}
	s.api.OpenTemplates(s.builds)
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
		Domain: s.cfg.Proxy.Authority(), MaxTimeout: time.Duration(s.cfg.API.MaxTimeout), MaxBatch: s.cfg.API.MaxBatch,
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
	s.metrics.MustRegister(s.engine, s.builds)
	s.e2b.Open(s.engine, s.db, s.db, s.builds)
	return nil
}
