package e2b

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// listening is a stream of a server's events.
type listening struct {
	*testing.T
	resp  *http.Response
	lines *bufio.Reader
	id    string // of the last event that has one
}

func listen(t *testing.T, addr, path string, headers ...string) *listening {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-API-KEY", testKey)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return &listening{T: t, resp: resp, lines: bufio.NewReader(resp.Body)}
}

// next sees that an event comes, whose data has the words.
func (l *listening) next(event string, words ...string) {
	l.Helper()
	var text string
	for {
		line, err := l.lines.ReadString('\n')
		if err != nil {
			l.Fatalf("after %q: %v", text, err)
		}
		if line == "\n" && text != "" {
			break
		}
		if id, ok := strings.CutPrefix(line, "id: "); ok {
			l.id = strings.TrimSpace(id)
		} else if !strings.HasPrefix(line, ":") && line != "\n" {
			text += line
		}
	}
	if !strings.HasPrefix(text, "event: "+event+"\ndata: {") && !strings.HasPrefix(text, "event: "+event+"\ndata: [") {
		l.Errorf("not %s, but %q", event, text)
	}
	for _, w := range words {
		if !strings.Contains(text, w) {
			l.Errorf("no %q in %q", w, text)
		}
	}
}

func (l *listening) ends() {
	l.Helper()
	if rest, err := io.ReadAll(l.lines); err != nil || strings.Contains(string(rest), "event") {
		l.Errorf("it goes on with %q, %v", rest, err)
	}
}

func TestWatch(t *testing.T) {
	engine, addr, stop, ended := serving(t, nil)
	sb := engine.add(lifecycle.Create{Team: testTeam, Template: "base", Timeout: time.Minute, Metadata: map[string]string{"a": "<b>"}})
	engine.add(lifecycle.Create{Team: "green", Template: "base"})
	l := listen(t, addr, "/sandboxes/events")
	if ct := l.resp.Header.Get("Content-Type"); ct != "text/event-stream" || l.resp.Header.Get(requestHeader) == "" {
		t.Errorf("%v", l.resp.Header)
	}
	l.next(eventAll, sb.ID, `"state":"running"`, `"a":"<b>"`, `"endAt":"`)
	sb.State = lifecycle.Pausing
	engine.changes <- lifecycle.Change{Sandboxes: []lifecycle.Sandbox{sb}}
	l.next(eventChanged, sb.ID, `"state":"paused"`)
	engine.changes <- lifecycle.Change{Gone: []string{sb.ID}}
	l.next(eventGone, `{"sandboxID":"`+sb.ID+`"}`)
	// The server's end doesn't wait for who listens.
	began := time.Now()
	stop()
	l.next(eventError, `"code":503`)
	l.ends()
	if err := <-ended; err != nil || time.Since(began) > drainTimeout {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

func TestFollowLog(t *testing.T) {
	engine, addr, _, _ := serving(t, nil)
	sb := engine.add(lifecycle.Create{Team: testTeam, Template: "base"})
	l := listen(t, addr, "/sandboxes/"+sb.ID+"/logs/events?tail=7&follow=true")
	l.next(eventLog, `"message":"it is \"up\""`, `"level":"info"`, `"pid":"7"`)
	after := listen(t, addr, "/sandboxes/"+sb.ID+"/logs/events?tail=7", "Last-Event-ID", l.id)
	after.next(eventLog, `"message":"hm"`)
	after.next(eventEnd)
	l.next(eventLog, `"message":"hm"`)
	close(engine.changes)
	l.next(eventEnd)
	l.ends()
	if !strings.Contains(engine.last.(string), "false 7") {
		t.Errorf("the engine was asked %q", engine.last)
	}
	for path, status := range map[string]int{
		"/sandboxes/inone/logs/events": 404, "/sandboxes/" + sb.ID + "/logs/events?tail=-2": 400, "/sandboxes/" + sb.ID + "/logs/events?x=1": 400,
		"/sandboxes/events?limit=1": 400, "/sandboxes/-/logs/events": 400,
	} {
		if l := listen(t, addr, path); l.resp.StatusCode != status || l.resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %s", path, l.resp.Status)
		}
	}
}

// TestRevokedWhileListening: with a revoked key, nobody hears more.
func TestRevokedWhileListening(t *testing.T) {
	s, _ := newTestServer(t, quick)
	keys := &fakeKeys{}
	s.keys = keys
	srv := newHTTPServer(t, s.Handler())
	l := listen(t, srv, "/sandboxes/events")
	l.next(eventAll)
	keys.revoked.Store(true)
	l.next(eventError, `"code":401`)
	l.ends()
}

// TestManyStreams: a team has only so many streams, and others have theirs.
func TestManyStreams(t *testing.T) {
	_, addr, _, _ := serving(t, nil)
	for range maxStreams {
		listen(t, addr, "/sandboxes/events").next(eventAll)
	}
	l := listen(t, addr, "/sandboxes/events")
	if l.resp.StatusCode != http.StatusTooManyRequests {
		t.Error(l.resp.Status)
	}
}

func newHTTPServer(t *testing.T, h http.Handler) (addr string) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}
