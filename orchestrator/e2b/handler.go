package e2b

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/e2b/jsonbody"
)

// bodyLimit bounds a request's body, in bytes.
const bodyLimit = 1 << 20

// call is a request whose key is good and whose body was read.
type call struct {
	ctx   context.Context
	id    string // the request's
	named string // what the client has called it, "" if nothing
	team  string // whose key it is
	key   string
	at    string // the API, as the client has reached it: a URL without a path
	body  *jsonbody.Object
	query *query
	// lastEvent is the id of the last event that the client has of a stream that has broken off, "" if it has none.
	lastEvent string
	// path is a wildcard of the route's pattern.
	path func(wildcard string) string
	err  error // that was noted first
}

// note has something be wrong with the call, unless err is nil.
func (c *call) note(err error) {
	if c.err == nil && err != nil {
		c.err = cmp.Or(c.body.Failed(), err)
	}
}

// checked is the first thing that is wrong with the call, after all was asked of its body and query.
func (c *call) checked() error {
	c.note(c.body.Err())
	c.note(c.query.Err())
	return c.err
}

// answer is what a call comes to, unless it fails. A body of nil is none.
type answer struct {
	status int
	body   any
	header http.Header
}

var done = answer{status: http.StatusNoContent}

func ok(body any) answer      { return answer{status: http.StatusOK, body: body} }
func created(body any) answer { return answer{status: http.StatusCreated, body: body} }
func taken(body any) answer   { return answer{status: http.StatusAccepted, body: body} }

// with adds a header, unless it has no value.
func (a answer) with(name, value string) answer {
	if value != "" {
		if a.header == nil {
			a.header = http.Header{}
		}
		a.header.Set(name, value)
	}
	return a
}

// Handler serves the API.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, f := range s.public() {
		mux.Handle(pattern, f)
	}
	for pattern, f := range s.calls() {
		mux.Handle(pattern, s.serve(f))
	}
	for pattern, f := range s.streams() {
		mux.Handle(pattern, f)
	}
	for pattern, why := range unsupported {
		mux.Handle(pattern, s.serve(func(*call) (answer, error) { return answer{}, errdefs.ErrNotImplemented.WithMessage(why) }))
	}
	return s.access(func(x *exchange, r *http.Request) {
		if err := s.tooMany(r); err != nil {
			x.Header().Set("Connection", "close")
			s.refuse(x, r, err)
			return
		}
		if !s.enter() {
			x.Header().Set("Connection", "close") // the next one finds the next server
			s.refuse(x, r, errStopping)
			return
		}
		defer s.leave()
		if clean := path.Clean(r.URL.EscapedPath()); clean != r.URL.EscapedPath() { // the mux would redirect
			s.refuse(x, r, noEndpoint(r))
			return
		}
		h, pattern := mux.Handler(r)
		if x.route = pattern; pattern == "" {
			s.refuse(x, r, missing(h, x, r))
			return
		}
		mux.ServeHTTP(x, r)
	})
}

func noEndpoint(r *http.Request) error {
	return fail(http.StatusNotFound, "the API has no %s %s", r.Method, quote(redact(r.URL.Path)))
}

// missing is why the mux has no route: its own answer, of which only the status is of use, and the methods that there are.
func missing(h http.Handler, w http.ResponseWriter, r *http.Request) error {
	own := &discarded{header: http.Header{}}
	h.ServeHTTP(own, r)
	if own.status != http.StatusMethodNotAllowed {
		return noEndpoint(r)
	}
	allow := own.header.Get("Allow")
	w.Header().Set("Allow", allow)
	return fail(own.status, "%s isn't possible at %s, but %s is", r.Method, quote(redact(r.URL.Path)), allow)
}

// discarded is an answer that nobody gets.
type discarded struct {
	header http.Header
	status int
}

func (d *discarded) Header() http.Header         { return d.header }
func (d *discarded) Write(b []byte) (int, error) { return len(b), nil }
func (d *discarded) WriteHeader(status int)      { d.status = status }

// serve makes a handler of what is done for a call.
func (s *Server) serve(f func(*call) (answer, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		c, err := s.receive(x, r)
		if err != nil {
			s.refuse(x, r, err)
			return
		}
		a, err := f(c)
		if err != nil {
			s.refuse(x, r, err)
			return
		}
		for name, values := range a.header {
			w.Header()[name] = values
		}
		s.send(x, a.status, a.body)
	})
}

// ready tells what the server waits for, nil if it is open.
func (s *Server) ready() error {
	if s.open.Load() {
		return nil
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("cube is starting and waits for: %s", s.options.Awaited()))
}

// receive makes a call of a request: first of its key, then of the rest of it. Before the server is open it isn't known whose
// a key is.
func (s *Server) receive(x *exchange, r *http.Request) (*call, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	key, err := keyOf(r.Header)
	if err != nil {
		return nil, err
	}
	var keyID string
	if x.team, keyID, err = s.keys.Authenticate(r.Context(), key); err != nil {
		return nil, unauthorized(err)
	}
	if team := r.Header.Get(teamHeader); team != "" && team != x.team {
		return nil, fail(http.StatusForbidden, "%s: the key isn't one of team %s", teamHeader, quote(team))
	}
	body, err := readBody(x, r)
	if err != nil {
		return nil, err
	}
	// What is read from now on is whether the client is still there.
	_ = http.NewResponseController(x).SetReadDeadline(time.Time{}) // there is none where it isn't known
	ctx := audit.With(r.Context(), audit.By{Via: audit.API, Key: keyID, Request: redact(x.id), From: r.RemoteAddr})
	c := &call{ctx: ctx, id: x.id, named: r.Header.Get(requestHeader), team: x.team, key: key, at: reached(r), query: readQuery(r), lastEvent: r.Header.Get(lastEventHeader), path: r.PathValue}
	if c.body, err = jsonbody.Parse(body); err != nil {
		return nil, err
	}
	return c, nil
}

// reached is where a client has reached the API, maybe by way of a proxy.
func reached(r *http.Request) string {
	at := url.URL{Scheme: "http", Host: cmp.Or(r.Header.Get("X-Forwarded-Host"), r.Host)}
	if r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https" {
		at.Scheme = "https"
	}
	return at.String()
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyLimit))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, fail(http.StatusRequestEntityTooLarge, "the body is larger than %d bytes", large.Limit)
	case err != nil:
		return nil, fail(http.StatusBadRequest, "the body didn't come whole: %v", err)
	}
	return body, nil
}

// send writes an answer. A client that doesn't take it in time doesn't get it.
func (s *Server) send(w http.ResponseWriter, status int, body any) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.timeout(answerTimeout))) // there is none where it isn't known
	if body == nil {
		w.WriteHeader(status)
		return
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(body); err != nil {
		panic(fmt.Errorf("encode an answer: %w", err)) // it is made of our own types
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store") // there are tokens in it
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // the client has gone away
}

// refuse answers with an error.
func (s *Server) refuse(x *exchange, r *http.Request, err error) {
	body, again := explain(err, x.id)
	if body.Code >= http.StatusInternalServerError {
		x.cause = err
	}
	if again > 0 {
		x.Header().Set("Retry-After", seconds(again))
	}
	if body.Code == http.StatusUnauthorized {
		x.Header().Set("WWW-Authenticate", "Bearer")
	}
	body.Message = strings.TrimSpace(strings.ReplaceAll(body.Message, "\n", "; ")) // errors that were joined
	s.send(x, body.Code, body)
}
