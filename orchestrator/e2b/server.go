package e2b

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/health"
)

// How long clients may take for their part, and how long requests are waited for when the server ends.
const (
	headerTimeout = 10 * time.Second
	bodyTimeout   = 30 * time.Second
	answerTimeout = time.Minute
	idleTimeout   = 2 * time.Minute
	drainTimeout  = 5 * time.Second // and as long again for those that are given up then
)

// headerLimit bounds a request's line and headers, in bytes.
const headerLimit = 64 << 10

// Options are what a server is made with.
type Options struct {
	// Domain is what sandboxes' host names end in, as clients reach them: with a port unless that is the scheme's own.
	Domain string
	// MaxTimeout is the longest that the engine lets a client ask for; 0 is any.
	MaxTimeout time.Duration
	// MaxBatch is how many items a batch may have.
	MaxBatch int
	// Ready tells which dependencies can be used.
	Ready func(context.Context) health.Report
	// Awaited names the dependency that a server waits for which isn't open yet.
	Awaited func() string
	// Metrics get the API's, and are served by it, and so are MoreMetrics, if there are any, to clients of the addresses MetricsFrom.
	Metrics     *prometheus.Registry
	MoreMetrics prometheus.Gatherer
	MetricsFrom []netip.Prefix
	Log         *slog.Logger
	// Timeout scales a deadline for this host.
	Timeout func(time.Duration) time.Duration
}

// Server is the API.
type Server struct {
	options  Options
	log      *slog.Logger
	timeout  func(time.Duration) time.Duration
	counters *counters

	// open is set once, after what calls are answered by.
	open      atomic.Bool
	engine    Engine
	keys      Keys
	templates Templates
	builds    Builds

	stopping  chan struct{} // closed when Serve is to end
	mu        sync.Mutex
	streaming map[string]int // streams of events that are open, by team
}

// New makes a server, which can serve at once, and refuses calls until it is open.
func New(o Options) *Server {
	return &Server{options: o, log: o.Log, timeout: o.Timeout, counters: newCounters(o.Metrics), stopping: make(chan struct{}), streaming: map[string]int{}}
}

// Open has calls be answered, by those. It is called once.
func (s *Server) Open(engine Engine, keys Keys, templates Templates, builds Builds) {
	s.engine, s.keys, s.templates, s.builds = engine, keys, templates, builds
	s.open.Store(true)
}

// Serve answers on a listener, which it closes, until the context ends. Requests that are under way then are finished, or given up
// and told so if that takes too long; streams of events end at once. It is called once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	requests, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	srv := &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: s.timeout(headerTimeout),
		IdleTimeout:       s.timeout(idleTimeout),
		MaxHeaderBytes:    headerLimit,
		BaseContext:       func(net.Listener) context.Context { return requests },
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // what clients do wrong below HTTP
	}
	drain := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.timeout(drainTimeout))
		defer cancel()
		return srv.Shutdown(ctx)
	}
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		close(s.stopping)
		err := drain()
		if errors.Is(err, context.DeadlineExceeded) {
			cut()
			if err = drain(); errors.Is(err, context.DeadlineExceeded) {
				s.log.Warn("requests are still under way when the API ends")
				err = srv.Close()
			}
		}
		ended <- err
	})
	err := srv.Serve(l)
	if stop() {
		return err // it couldn't go on
	}
	return <-ended
}
