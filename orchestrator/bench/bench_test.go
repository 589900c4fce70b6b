package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/orchestrator/client"
)

// server is one of E2B's API, its proxy, and envd in each of its sandboxes.
type server struct {
	process.UnimplementedProcessHandler
	mu        sync.Mutex
	boxes     map[string]bool // whether it is paused
	snapshots map[string]bool
	made      int
	most      int            // sandboxes that there were at once
	asked     map[string]int // by envd's way, and the API's
	room      int            // for sandboxes
	marks     int            // sandboxes that were made with the run's mark
	// Hidden: the answers of creates don't come.
	hidden bool
	// entered is told of each create, unless it is nil.
	entered chan struct{}
}

func newServer(t *testing.T) (*server, *client.Client) {
	s := &server{boxes: map[string]bool{}, snapshots: map[string]bool{}, asked: map[string]int{}, room: 1000}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /sandboxes", s.create)
	mux.HandleFunc("GET /v2/sandboxes", s.list)
	mux.HandleFunc("DELETE /sandboxes/{id}", s.box(func(id string) any { delete(s.boxes, id); return nil }))
	mux.HandleFunc("POST /sandboxes/{id}/pause", s.box(func(id string) any { s.boxes[id] = true; return nil }))
	mux.HandleFunc("POST /sandboxes/{id}/connect", s.box(func(id string) any { s.boxes[id] = false; return map[string]string{"sandboxID": id} }))
	mux.HandleFunc("POST /sandboxes/{id}/fork", s.box(func(string) any { return []any{map[string]any{"sandbox": s.add()}} }))
	mux.HandleFunc("POST /sandboxes/{id}/snapshots", s.box(func(id string) any {
		s.snapshots["snap-"+id+":default"] = true
		return map[string]string{"snapshotID": "snap-" + id + ":default"}
	}))
	mux.HandleFunc("DELETE /templates/{id}", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.snapshots[r.PathValue("id")] {
			refuse(w, 404, "no such template")
			return
		}
		delete(s.snapshots, r.PathValue("id"))
		w.WriteHeader(204)
	})
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, r *http.Request) { s.into(r.Header, "health"); w.WriteHeader(204) })
	path, handler := process.NewProcessHandler(s)
	mux.Handle(path, handler)
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	api, err := client.New(client.Options{API: srv.URL, Key: "e2b_key", Sandbox: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	return s, api
}

func refuse(w http.ResponseWriter, code int, message string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"code":%d,"message":%q}`, code, message)
}

// add has the lock held.
func (s *server) add() map[string]string {
	s.made++
	id := fmt.Sprintf("i%020d", s.made)
	s.boxes[id] = false
	s.most = max(s.most, len(s.boxes))
	return map[string]string{"sandboxID": id, "envdAccessToken": "token-" + id}
}

func (s *server) create(w http.ResponseWriter, r *http.Request) {
	var c client.Create
	if err := json.NewDecoder(r.Body).Decode(&c); err != nil || c.TemplateID != "base" || !c.Secure || c.Timeout < 60 {
		refuse(w, 400, fmt.Sprintf("%+v", c))
		return
	}
	s.mu.Lock()
	full := len(s.boxes) >= s.room
	var sb map[string]string
	if !full {
		sb = s.add()
		if c.Metadata[mark] != "" {
			s.marks++
		}
	}
	hidden, entered := s.hidden, s.entered
	s.mu.Unlock()
	if entered != nil {
		entered <- struct{}{}
		time.Sleep(50 * time.Millisecond)
	}
	switch {
	case full:
		refuse(w, 429, fmt.Sprintf("team blue runs %d sandboxes", s.room))
	case hidden:
		panic(http.ErrAbortHandler)
	default:
		w.WriteHeader(201)
		_ = json.NewEncoder(w).Encode(sb)
	}
}

func (s *server) list(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []map[string]string{}
	for id := range s.boxes {
		if strings.HasPrefix(r.URL.Query().Get("metadata"), mark+"=") {
			all = append(all, map[string]string{"sandboxID": id, "state": "running"})
		}
	}
	_ = json.NewEncoder(w).Encode(all)
}

func (s *server) box(do func(id string) any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.asked[r.Method+" "+r.URL.Path[strings.LastIndexByte(r.URL.Path, '/'):]]++
		id := r.PathValue("id")
		if _, ok := s.boxes[id]; !ok {
			refuse(w, 404, "sandbox '"+id+"' not found")
			return
		}
		answer := do(id)
		if answer == nil {
			w.WriteHeader(204)
			return
		}
		w.WriteHeader(201)
		_ = json.NewEncoder(w).Encode(answer)
	}
}

// into counts what envd is asked, if it is by who may and of a sandbox that runs.
func (s *server) into(h http.Header, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := h.Get("E2b-Sandbox-Id")
	if paused, ok := s.boxes[id]; !ok || paused || h.Get("X-Access-Token") != "token-"+id {
		what = "in vain"
	}
	s.asked[what]++
}

func (s *server) Start(_ context.Context, r *connect.Request[process.StartRequest], to *connect.ServerStream[process.StartResponse]) error {
	s.into(r.Header(), "exec")
	code := int32(0)
	if strings.Contains(r.Msg.GetProcess().GetArgs()[2], "false") {
		code = 1
	}
	return to.Send(&process.StartResponse{Event: &process.ProcessEvent{Event: &process.ProcessEvent_End_{End: &process.ProcessEvent_End{ExitCode: code, Exited: true}}}})
}

func options(change func(*Options)) Options {
	o := Options{Template: "base", Operations: Operations, Count: 30, Concurrency: 4, Command: "true", Say: func(string) {}}
	if change != nil {
		change(&o)
	}
	return o
}

func (s *server) nothingLeft(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.boxes)+len(s.snapshots) > 0 {
		t.Errorf("left: %v, %v", s.boxes, s.snapshots)
	}
}

func TestRun(t *testing.T) {
	s, api := newServer(t)
	rep, err := Run(t.Context(), api, options(nil))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range rep.Rows {
		names = append(names, r.Operation)
		if want := 30; r.Operation == "kill" && r.Count != 26 || r.Operation != "kill" && r.Count != want || r.Failed != 0 || len(r.Failures) != 0 || r.Concurrency != 4 {
			t.Errorf("%+v", r)
		}
		if !(0 < r.P50 && r.P50 <= r.P95 && r.P95 <= r.P99 && r.P99 <= r.Max && r.Mean <= r.Max && r.Max <= r.Took && r.PerSecond > 0) {
			t.Errorf("%+v", r)
		}
	}
	if want := []string{Create, "kill", Exec, Snapshot, Fork, Pause, "resume"}; !slices.Equal(names, want) {
		t.Errorf("%v", names)
	}
	// Creates by four workers, four sandboxes for each of the others, and children.
	if s.made != 30+4*4+30 || s.marks != 30+4*4 || s.most > 8 || s.asked["exec"] != 30 || s.asked["health"] != 30+4*4+30+30 || s.asked["in vain"] != 0 {
		t.Errorf("%d made, %d marked, %d at once, asked %v", s.made, s.marks, s.most, s.asked)
	}
	s.nothingLeft(t)
	if c := rep.Conditions; c.API != api.Address() || c.Until != "envd" || c.Template != "base" || c.Count != 30 {
		t.Errorf("%+v", c)
	}
}

// TestFailures are counted by reason, whatever id or number is in it.
func TestFailures(t *testing.T) {
	s, api := newServer(t)
	s.room = 2
	rep, err := Run(t.Context(), api, options(func(o *Options) { o.Operations, o.Command, o.Answered = []string{Create, Exec}, "false", true }))
	if err != nil {
		t.Fatal(err)
	}
	creates, execs := rep.Rows[0], rep.Rows[2]
	if creates.Count+creates.Failed != 30 || creates.Failures["429: the API: team blue runs N sandboxes"] != creates.Failed || creates.Failed == 0 {
		t.Errorf("%+v", creates)
	}
	if execs.Concurrency != 2 || execs.Failures["the command ended with N"] != 30 || execs.Count != 0 {
		t.Errorf("%+v", execs)
	}
	if s.asked["health"] != 0 {
		t.Errorf("envd was asked: %v", s.asked)
	}
	s.room = 0
	if rep, err = Run(t.Context(), api, options(nil)); err != nil || len(rep.Rows) != 6 || rep.Rows[2].Failed != 30 {
		t.Errorf("without room: %+v, %v", rep.Rows, err)
	}
	s.nothingLeft(t)
}

// TestNothingLeft: neither of what was under way when it was interrupted, nor of what the server has made without an answer.
func TestNothingLeft(t *testing.T) {
	s, api := newServer(t)
	s.entered = make(chan struct{}, 100)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	go func() {
		for range 6 {
			<-s.entered
		}
		cancel(enough)
	}()
	if _, err := Run(ctx, api, options(nil)); !errors.Is(err, enough) || s.made < 6 || s.made > 12 {
		t.Errorf("%v, after %d creates", err, s.made)
	}
	s.nothingLeft(t)
	s, api = newServer(t)
	s.hidden = true
	if rep, err := Run(t.Context(), api, options(nil)); err != nil || rep.Rows[0].Failed != 30 || s.made < 30 {
		t.Errorf("%+v, %v", rep.Rows, err)
	}
	s.nothingLeft(t)
}

func TestQuantile(t *testing.T) {
	var all []time.Duration
	for n := range 100 {
		all = append(all, time.Duration(n+1))
	}
	for q, want := range map[float64]time.Duration{0: 1, .5: 50, .95: 95, .99: 99, 1: 100} {
		if got := quantile(all, q); got != want {
			t.Errorf("%v: %d", q, got)
		}
	}
	if quantile(all[:1], .95) != 1 || quantile(all[:2], .5) != 1 || quantile(all[:2], .95) != 2 {
		t.Error("of few")
	}
}
