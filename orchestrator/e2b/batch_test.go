package e2b

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// running is a batch that a client listens to.
type running struct {
	*testing.T
	resp  *http.Response
	lines *bufio.Scanner
	hang  context.CancelFunc // up
}

// beginBatch asks for a batch.
func beginBatch(t *testing.T, addr, body string) *running {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/batch", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-API-KEY", testKey)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	return &running{t, resp, lines, cancel}
}

// told is all that a line may have.
type told struct {
	Type, SandboxID, Status, Error, Message, Stdout, Stderr string
	Index, Count, Done, Running, OK, Failed, Code           int
	ExitCode                                                *int
}

// next is the next line. Those of progress are left out unless they are wanted.
func (r *running) next(progress bool) (l told, ok bool) {
	r.Helper()
	for r.lines.Scan() {
		l = told{}
		if err := json.Unmarshal(r.lines.Bytes(), &l); err != nil {
			r.Fatalf("%q: %v", r.lines.Text(), err)
		}
		if progress || l.Type != "progress" {
			return l, true
		}
	}
	return told{}, false
}

func TestBatch(t *testing.T) {
	engine, addr, _, _ := serving(t, nil)
	r := beginBatch(t, addr, `{"template":"name1","cmd":"work hard","envVars":{"A":"1","B":"1"},"envs":[{"B":"0"},{"B":"1"},{"B":"2"}],"metadata":{"m":"x"},"concurrency":2,"network":{"denyOut":["10.0.0.0/8"]}}`)
	if r.resp.StatusCode != 200 || r.resp.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatal(r.resp.Status, r.resp.Header)
	}
	if l, _ := r.next(true); l.Type != "progress" || l.Count != 3 {
		t.Errorf("it begins with %+v", l)
	}
	seen, boxes := map[int]bool{}, map[string]bool{}
	for range 3 {
		l, _ := r.next(false)
		seen[l.Index], boxes[l.SandboxID] = true, true
		if l.Type != "result" || l.Status != "ok" || l.ExitCode == nil || *l.ExitCode != 0 || l.Error != "" || l.Stderr != "warned\n" ||
			l.Stdout != "work hard map[A:1 B:"+string(rune('0'+l.Index))+"]" {
			t.Errorf("%+v", l)
		}
	}
	if l, _ := r.next(false); l.Type != "summary" || l.Count != 3 || l.OK != 3 || l.Failed != 0 || len(seen) != 3 || len(boxes) != 3 {
		t.Errorf("%+v, of %v in %v", l, seen, boxes)
	}
	if l, more := r.next(true); more {
		t.Errorf("then comes %+v", l)
	}
	if len(engine.boxes) != 0 || engine.made != 3 {
		t.Errorf("%d made, %d left", engine.made, len(engine.boxes))
	}
}

// TestBatchFails: what has become of an item is told, not what is wrong with this machine.
func TestBatchFails(t *testing.T) {
	engine, addr, _, _ := serving(t, nil)
	one := func(body string) told {
		t.Helper()
		l, _ := beginBatch(t, addr, body).next(false)
		return l
	}
	if l := one(`{"template":"name1","cmd":"fail","count":1}`); l.Status != "failed" || l.ExitCode == nil || *l.ExitCode != 3 || l.Error != "exit status 3" {
		t.Errorf("%+v", l)
	}
	if l := one(`{"template":"name1","cmd":"end","count":1}`); l.Status != "failed" || l.ExitCode != nil || l.Error != "the machine has ended" {
		t.Errorf("%+v", l)
	}
	if l := one(`{"template":"name1","cmd":"hang","count":1,"timeout":1}`); l.Status != "timeout" || l.ExitCode != nil || !strings.Contains(l.Error, "longer than its timeout") {
		t.Errorf("%+v", l)
	}
	engine.mu.Lock()
	engine.fails = errors.New("sda: read error")
	engine.mu.Unlock()
	if l := one(`{"template":"name1","cmd":"x","count":1}`); l.Status != "failed" || !strings.Contains(l.Error, "internal error") || strings.Contains(l.Error, "sda") {
		t.Errorf("%+v", l)
	}
	engine.mu.Lock()
	engine.fails = errdefs.ErrNotFound.WithMessage("template 'name1' has no such tag")
	engine.mu.Unlock()
	if l := one(`{"template":"name1","cmd":"x","count":1}`); l.Status != "refused" || !strings.Contains(l.Error, "no such tag") {
		t.Errorf("%+v", l)
	}
}

// TestBatchGone: nothing is left of a batch whose client has gone, whose key was revoked, or whose server ends; who still listens is told why.
func TestBatchGone(t *testing.T) {
	const hangs = `{"template":"name1","cmd":"hang","count":40,"concurrency":20}`
	t.Run("client", func(t *testing.T) {
		engine, addr, _, _ := serving(t, nil)
		r := beginBatch(t, addr, hangs)
		r.next(true)
		engine.until(t, 20)
		r.hang()
		engine.until(t, 0)
	})
	t.Run("server", func(t *testing.T) {
		engine, addr, stop, ended := serving(t, nil)
		r := beginBatch(t, addr, hangs)
		r.next(true)
		engine.until(t, 20)
		stop()
		if l, _ := r.next(false); l.Type != "error" || l.Code != 503 {
			t.Errorf("%+v", l)
		}
		if err := <-ended; err != nil || len(engine.boxes) != 0 {
			t.Errorf("%v, %d left", err, len(engine.boxes))
		}
	})
	t.Run("key", func(t *testing.T) {
		s, engine := newTestServer(t, quick)
		keys := &fakeKeys{}
		s.keys = keys
		r := beginBatch(t, newHTTPServer(t, s.Handler()), hangs)
		engine.until(t, 20)
		keys.revoked.Store(true)
		if l, _ := r.next(false); l.Type != "error" || l.Code != 401 {
			t.Errorf("%+v", l)
		}
		engine.until(t, 0)
	})
}

// until waits until so many sandboxes are there.
func (f *fakeEngine) until(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		have := len(f.boxes)
		f.mu.Unlock()
		if have == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d sandboxes, not %d", have, n)
		}
	}
}

// TestBatchProgress: a batch that has nothing else to tell tells that.
func TestBatchProgress(t *testing.T) {
	s, engine := newTestServer(t, quick)
	r := beginBatch(t, newHTTPServer(t, s.Handler()), `{"template":"name1","cmd":"hang","count":3,"concurrency":2}`)
	r.next(true)
	engine.until(t, 2)
	for range 10 {
		l, _ := r.next(true)
		if l.Type != "progress" || l.Count != 3 || l.Done != 0 {
			t.Fatalf("%+v", l)
		}
		if l.Running == 2 {
			return
		}
	}
	t.Error("nothing is said to run")
}

// TestBadBatches: every rule, with the field that breaks it. No sandbox is made.
func TestBadBatches(t *testing.T) {
	s, engine := newTestServer(t, func(o *Options) { o.MaxBatch, o.MaxTimeout = 5, time.Hour })
	h := s.Handler()
	for body, says := range map[string]string{
		``:                                       "template: it is required",
		`{"template":"name1","count":1}`:         "cmd: it is required",
		`{"template":"name1","cmd":"x"}`:         "count: it is required where there are no envs",
		`{"template":"a b","cmd":"x","count":1}`: "template: ",
		`{"template":"name1","cmd":" \n","count":1}`:                                                           "cmd: it is empty",
		`{"template":"name1","cmd":"a\u0000b","count":1}`:                                                      "cmd: a command can't have NUL",
		`{"template":"name1","cmd":["x"],"count":1}`:                                                           "cmd: it is an array, it must be a string",
		`{"template":"name1","cmd":"` + strings.Repeat("x", maxCommand+1) + `","count":1}`:                     "cmd: it has 65537 bytes",
		`{"template":"name1","cmd":"x","count":0}`:                                                             "count: 0 is out of range, it must be from 1 to 5",
		`{"template":"name1","cmd":"x","count":6}`:                                                             "count: 6 is out of range, it must be from 1 to 5",
		`{"template":"name1","cmd":"x","envs":[{},{},{},{},{},{}]}`:                                            "envs: there are 6, there can be 5",
		`{"template":"name1","cmd":"x","count":2,"envs":[{}]}`:                                                 "count: 2 isn't how many envs there are, which is 1",
		`{"template":"name1","cmd":"x","envs":{}}`:                                                             "envs: it is an object, it must be an array",
		`{"template":"name1","cmd":"x","envs":[{},null]}`:                                                      "envs[1]: it is null",
		`{"template":"name1","cmd":"x","envs":[{"A":1}]}`:                                                      `envs[0]["A"]: it is a number`,
		`{"template":"name1","cmd":"x","envs":[{"A=":"1"}]}`:                                                   `envs[0]["A="]: a variable's name`,
		`{"template":"name1","cmd":"x","envs":[{"E2B_SANDBOX_ID":"1"}]}`:                                       `envs[0]["E2B_SANDBOX_ID"]: it is the sandbox's own`,
		`{"template":"name1","cmd":"x","count":1,"envVars":{"":"1"}}`:                                          `envVars[""]: `,
		`{"template":"name1","cmd":"x","envVars":` + bigEnv(4) + `,"envs":[` + bigEnv(1) + `]}`:                "envs[0]: with envVars they have",
		`{"template":"name1","cmd":"x","count":1,"metadata":{"a":"` + strings.Repeat("x", maxMetadata) + `"}}`: "metadata: ",
		`{"template":"name1","cmd":"x","count":1,"timeout":0}`:                                                 "timeout: 0 is too small",
		`{"template":"name1","cmd":"x","count":1,"timeout":3601}`:                                              "timeout: 1h0m1s is more than sandboxes here may run, which is 1h0m0s",
		`{"template":"name1","cmd":"x","count":1,"deadline":86401}`:                                            "deadline: 86401 is out of range",
		`{"template":"name1","cmd":"x","count":1,"concurrency":0}`:                                             "concurrency: 0 is out of range, it must be from 1 to 100",
		`{"template":"name1","cmd":"x","count":1,"network":{"denyOut":["::1"]}}`:                               "network.denyOut[0]: ",
		`{"template":"name1","cmd":"x","count":1,"allow_internet_access":"no"}`:                                "allow_internet_access: ",
		`{"template":"name1","cmd":"x","count":1,"command":"y"}`:                                               "command: unknown field",
	} {
		refused(t, ask(h, "POST", "/batch", body), 400, says)
	}
	refused(t, ask(h, "POST", "/batch", `{"template":"none","cmd":"x","count":1}`), 404, "'none' not found")
	if engine.made != 0 || engine.last != nil {
		t.Errorf("%d sandboxes were made, the engine was asked %v", engine.made, engine.last)
	}
}

// bigEnv has n variables of 120,000 bytes.
func bigEnv(n int) string {
	env := map[string]string{}
	for i := range n {
		env["V"+string(rune('a'+i))] = strings.Repeat("x", 120_000)
	}
	b, _ := json.Marshal(env)
	return string(b)
}
