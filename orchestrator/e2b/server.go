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

	"github.com/cubesandbox/cube/orchestrator/batch"
	"github.com/cubesandbox/cube/orchestrator/health"
)

// How long clients may take for their part, and how long requests are waited for when the server ends.
const (
	headerTimeout = 10 * time.Second
	bodyTimeout   = 30 * time.Second
	answerTimeout = time.Minute
	idleTimeout   = 2 * time.Minute
	drainTimeout  = 5 * time.Second // and as long again for those that are given up then
	closeTimeout  = time.Second
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
	// MaxConnections is how many connections there may be at a time. Those beyond are answered that there are too many.
	MaxConnections int
	Log            *slog.Logger
	// Timeout scales a deadline for this host.
	Timeout func(time.Duration) time.Duration
}

// Server is the API.
type Server struct {
	options  Options
	log      *slog.Logger
	timeout  func(time.Duration) time.Duration
	counters *counters
	batches  *batch.Metrics

	// open is set once, after what calls are answered by.
	open      atomic.Bool
	engine    Engine
	keys      Keys
	templates Templates
	builds    Builds

	http *http.Server
	cut  context.CancelFunc // gives up what is under way

	stopping  chan struct{} // closed when Serve is to end
	mu        sync.Mutex
	pending   int            // requests that are under way
	idle      chan struct{}  // to be closed when there is none, if somebody waits for that
	streaming map[string]int // streams of events that are open, by team
}

// New makes a server, which can serve at once, and refuses calls until it is open.
func New(o Options) *Server {
	s := &Server{options: o, log: o.Log, timeout: o.Timeout, counters: newCounters(o.Metrics), batches: batch.NewMetrics(o.Metrics), stopping: make(chan struct{}), streaming: map[string]int{}}
	requests, cut := context.WithCancel(context.Background())
	s.cut = cut
	s.http = &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: s.timeout(headerTimeout),
		IdleTimeout:       s.timeout(idleTimeout),
		MaxHeaderBytes:    headerLimit,
		BaseContext:       func(net.Listener) context.Context { return requests },
		ConnContext:       noteSurplus,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // what clients do wrong below HTTP
	}
	return s
}

// Open has calls be answered, by those. It is called once.
func (s *Server) Open(engine Engine, keys Keys, templates Templates, builds Builds) {
	s.engine, s.keys, s.templates, s.builds = engine, keys, templates, builds
	s.open.Store(true)
}

// Serve answers on a listener until the context ends. Requests that are under way then are finished, or given up and told so if
// that takes too long; streams of events end at once. What comes later is refused, until Close. It is called once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	failed := make(chan error, 1)
	go func() { failed <- s.http.Serve(limit(l, s.options.MaxConnections)) }()
	select {
	case err := <-failed:
		return err // it couldn't go on
	case <-ctx.Done():
	}
	idle := s.stop()
	if s.drained(idle) {
		return nil
	}
	s.cut()
	if !s.drained(idle) {
		s.log.Warn("requests are still under way when the API ends")
	}
	return nil
}

// Close ends the server, when what was refused last had a moment to be told.
func (s *Server) Close() error {
	s.cut()
	ctx, cancel := context.WithTimeout(context.Background(), s.timeout(closeTimeout))
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.http.Close()
	}
	return err
}

// enter lets a request begin, until leave, unless the server is to end.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.stopping:
		return false
	default:
	}
	s.pending++
	return true
}

func (s *Server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending--
	s.settle()
}

// stop has no request begin any more. The channel is closed when none is under way.
func (s *Server) stop() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.stopping)
	idle := make(chan struct{})
	s.idle = idle
	s.settle()
	return idle
}

// settle tells who waits for the last request that it has ended. It is called with the lock held.
func (s *Server) settle() {
	if s.idle != nil && s.pending == 0 {
		close(s.idle)
		s.idle = nil
	}
}

// drained tells whether the last request ends within the time that there is for it.
func (s *Server) drained(idle <-chan struct{}) bool {
	t := time.NewTimer(s.timeout(drainTimeout))
	defer t.Stop()
	select {
	case <-idle:
		return true
	case <-t.C:
		return false
	}
}
