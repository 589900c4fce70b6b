package e2b

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net/http"
	"regexp"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// requestHeader names a request, in both directions: a client may give it a name, and is told it.
const requestHeader = "X-Request-Id"

// lastEventHeader has a stream of events go on after one of another stream (HTML, 9.2.4).
const lastEventHeader = "Last-Event-Id"

var (
	requestForm = regexp.MustCompile(`^[!-~]{1,128}$`)
	// secretForm is what looks like a key that got where it doesn't belong.
	secretForm = regexp.MustCompile(`e2b_[0-9A-Za-z]{8,}`)
)

// counters are what is measured of requests.
type counters struct {
	took    *prometheus.HistogramVec
	pending prometheus.Gauge
}

func newCounters(to prometheus.Registerer) *counters {
	c := &counters{
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "cube_api_request_seconds",
			Help:    "Time from the headers of an API request to its answer.",
			Buckets: []float64{.001, .005, .025, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120},
		}, []string{"route", "code"}),
		pending: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "cube_api_requests_pending",
			Help: "API requests that have no answer yet.",
		}),
	}
	to.MustRegister(c.took, c.pending)
	return c
}

// exchange is a request on its way, for the log.
type exchange struct {
	http.ResponseWriter
	id     string // the request's
	route  string // "" if it has none
	team   string // "" if it has no good key
	status int    // 0 before the headers are written
	size   int
	cause  error // what an error's answer comes of
	// streams is when the first of an answer's events was sent; zero: it has none.
	streams time.Time
}

func (x *exchange) WriteHeader(status int) {
	if x.status == 0 {
		x.status = status
	}
	x.ResponseWriter.WriteHeader(status)
}

func (x *exchange) Write(b []byte) (int, error) {
	n, err := x.ResponseWriter.Write(b)
	x.size += n
	return n, err
}

// Unwrap is for http.ResponseController.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// access gives each request an id and a span, and tells of it in the log and the metrics. A panic is an answer, too.
func (s *Server) access(next func(*exchange, *http.Request)) http.Handler {
	tracer := otel.Tracer("github.com/cubesandbox/cube/orchestrator/e2b")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		x := &exchange{ResponseWriter: w, id: r.Header.Get(requestHeader)}
		if !requestForm.MatchString(x.id) {
			x.id = newID()
		}
		w.Header().Set(requestHeader, x.id)
		// The answer before has had a deadline, on the same connection. The body has one whoever reads it, which is net/http if
		// nobody else does. In tests there may be no connection.
		control := http.NewResponseController(w)
		_ = control.SetWriteDeadline(time.Time{})
		_ = control.SetReadDeadline(time.Now().Add(s.timeout(bodyTimeout)))

		ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
		ctx, span := tracer.Start(ctx, r.Method, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(attribute.String("cube.request", redact(x.id))))
		s.counters.pending.Inc()
		defer func() {
			failed := recover()
			if failed != nil && failed != http.ErrAbortHandler {
				s.log.Error("a request has panicked", "request", x.id, "panic", failed, "stack", string(debug.Stack()))
				if x.status == 0 {
					s.refuse(x, r, fail(http.StatusInternalServerError, "panic"))
					failed = nil
				} else {
					failed = http.ErrAbortHandler // what is half written must not pass for an answer
				}
			}
			answered := x.streams
			if answered.IsZero() {
				s.counters.pending.Dec()
				answered = time.Now()
			}
			s.counters.took.WithLabelValues(cmp.Or(x.route, "none"), strconv.Itoa(x.status)).Observe(answered.Sub(began).Seconds())
			if x.route != "" {
				span.SetName(x.route)
			}
			span.SetAttributes(attribute.Int("http.response.status_code", x.status))
			if x.status >= 500 {
				span.SetStatus(codes.Error, http.StatusText(x.status))
			}
			span.End()
			s.tell(x, r, time.Since(began))
			if failed != nil {
				panic(failed)
			}
		}()
		next(x, r.WithContext(ctx))
	})
}

// tell logs a request: no header but who says to be the client, no query and no body.
func (s *Server) tell(x *exchange, r *http.Request, took time.Duration) {
	level := slog.LevelInfo
	switch {
	case x.status >= 500:
		level = slog.LevelError
	case x.route == routeHealth || x.route == routeReady || x.route == routeMetrics:
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{
		slog.String("request", redact(x.id)), slog.String("method", r.Method), slog.String("path", redact(r.URL.Path)),
		slog.Int("status", x.status), slog.Int("bytes", x.size), slog.Duration("took", took),
		slog.String("from", r.RemoteAddr), slog.String("agent", redact(r.UserAgent())),
	}
	if by := r.Header.Get("X-Forwarded-For"); by != "" {
		attrs = append(attrs, slog.String("forwarded_for", redact(by)))
	}
	if x.team != "" {
		attrs = append(attrs, slog.String("team", x.team))
	}
	if x.cause != nil {
		attrs = append(attrs, slog.String("error", redact(x.cause.Error())))
	}
	s.log.LogAttrs(r.Context(), level, "request", attrs...)
}

// redact is for what a client may have put a key into.
func redact(s string) string {
	const most = 512
	if len(s) > most {
		s = s[:most] + "…"
	}
	return secretForm.ReplaceAllString(s, "e2b_…")
}

func newID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
