package e2b

import (
	"encoding/json"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// ids are those of a list's answer.
func ids(t *testing.T, body string, key string) (all []string) {
	t.Helper()
	var list []map[string]any
	if err := json.Unmarshal([]byte(body), &list); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	for _, e := range list {
		all = append(all, e[key].(string))
	}
	return all
}

// TestPages: a list is the same in pages of any size, and thousands of sandboxes are each in it once.
func TestPages(t *testing.T) {
	s, engine := newTestServer(t, nil)
	h := s.Handler()
	const n = 700
	var all []string
	for i := range n {
		sb := engine.add(lifecycle.Create{Team: testTeam, Template: "base", Timeout: time.Minute, Metadata: map[string]string{"even": strconv.FormatBool(i%2 == 0)}})
		all = append(all, sb.ID)
	}
	for i := 0; i < n; i += 3 {
		engine.boxes[all[i]].State = lifecycle.Pausing
	}
	engine.boxes[all[1]].State = lifecycle.Snapshotting
	engine.boxes[all[4]].State = lifecycle.Killing
	walk := func(query string) (got []string, running string) {
		for next := ""; ; {
			w := ask(h, "GET", "/v2/sandboxes?"+query+"&nextToken="+next, "")
			if w.Code != 200 {
				t.Fatalf("%s: %d %s", query, w.Code, w.Body)
			}
			got = append(got, ids(t, w.Body.String(), "sandboxID")...)
			running = w.Header().Get("X-Total-Running")
			if next = w.Header().Get("X-Next-Token"); next == "" {
				return got, running
			}
		}
	}
	expect := func(fits func(i int) bool) (want []string) {
		for i, id := range all {
			if i != 4 && fits(i) {
				want = append(want, id)
			}
		}
		return want
	}
	for _, tc := range []struct {
		query string
		fits  func(i int) bool
		asc   bool
	}{
		{"", func(int) bool { return true }, false},
		{"limit=7", func(int) bool { return true }, false},
		{"order=asc&limit=99", func(int) bool { return true }, true},
		{"state=paused", func(i int) bool { return i%3 == 0 }, false},
		{"state=running", func(i int) bool { return i%3 > 0 }, false},
		{"state=running,paused&metadata=even%3Dtrue", func(i int) bool { return i%2 == 0 }, false},
		{"state=running&state=paused&template=base", func(int) bool { return true }, false},
		{"template=none", func(int) bool { return false }, false},
		{"startedAfter=2026-01-31T12:00:10Z", func(i int) bool { return i >= 10 }, false},
	} {
		got, running := walk(tc.query)
		want := expect(tc.fits)
		runs := strconv.Itoa(len(expect(func(i int) bool { return tc.fits(i) && i%3 > 0 })))
		if strings.HasPrefix(tc.query, "state=paused") {
			runs = ""
		}
		if !tc.asc {
			slices.Reverse(want)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %d sandboxes, not %d", tc.query, len(got), len(want))
		}
		if running != runs {
			t.Errorf("%s: X-Total-Running is %q, not %q", tc.query, running, runs)
		}
	}
	if got := ids(t, ask(h, "GET", "/sandboxes", "").Body.String(), "sandboxID"); len(got) != len(expect(func(i int) bool { return i%3 > 0 })) {
		t.Errorf("the list of the first generation has %d", len(got))
	}
	// A place in one list isn't one in another; in a list of other pages it is.
	first := ask(h, "GET", "/v2/sandboxes?limit=2&metadata=even%3Dtrue", "").Header().Get("X-Next-Token")
	for query, status := range map[string]int{
		"metadata=even%3Dtrue&limit=50": 200, "state=paused,running&metadata=even%3Dtrue": 200, "metadata=even%3Dfalse": 400, "": 400, "metadata=even%3Dtrue&order=asc": 400,
		"metadata=even%3Dtrue&template=base": 400, "metadata=even%3Dtrue&state=paused": 400,
	} {
		w := ask(h, "GET", "/v2/sandboxes?nextToken="+first+"&"+query, "")
		if w.Code != status || status == 400 && !strings.Contains(w.Body.String(), "in another order, or with another filter") {
			t.Errorf("%s: %d %s", query, w.Code, w.Body)
		}
	}
	for i := range 5 {
		ask(h, "POST", "/sandboxes/"+all[1]+"/snapshots", fmt.Sprintf(`{"name":"s%d"}`, i))
	}
	for path, want := range map[string][2]string{
		"/snapshots?limit=2":             {"snapshotID", "blue/s4:default blue/s3:default blue/s2:default blue/s1:default blue/s0:default"},
		"/v2/templates?limit=1":          {"templateID", "tpl3 tpl2 tpl1"},
		"/v2/templates?limit=3":          {"templateID", "tpl3 tpl2 tpl1"},
		"/templates?teamID=blue":         {"templateID", "tpl3 tpl2 tpl1"},
		"/snapshots?limit=5&name=x/y:z":  {"snapshotID", "blue/s4:default blue/s3:default blue/s2:default blue/s1:default blue/s0:default"},
		"/snapshots?limit=3&sandboxID=i": {"snapshotID", "blue/s4:default blue/s3:default blue/s2:default blue/s1:default blue/s0:default"},
	} {
		var got []string
		for next := ""; ; {
			target := path
			if next != "" {
				target += "&nextToken=" + next
			}
			w := ask(h, "GET", target, "")
			got = append(got, ids(t, w.Body.String(), want[0])...)
			if next = w.Header().Get("X-Next-Token"); next == "" {
				break
			}
		}
		if strings.Join(got, " ") != want[1] {
			t.Errorf("%s: %v", path, got)
		}
	}
	// The builds of a template, in pages.
	var builds []any
	for next := ""; ; {
		w := ask(h, "GET", "/templates/tpl3?limit=2&nextToken="+next, "")
		var body map[string]any
		if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
			t.Fatal(err)
		}
		builds = append(builds, body["builds"].([]any)...)
		if next = w.Header().Get("X-Next-Token"); next == "" {
			break
		}
	}
	if len(builds) != 3 {
		t.Errorf("%v", builds)
	}
}

// encoded is a metadata filter as SDKs send it, with the encoding of the query undone.
func encoded(m map[string]string) string {
	v := url.Values{}
	for k, s := range m {
		v.Set(strings.ReplaceAll(url.QueryEscape(k), "+", "%20"), strings.ReplaceAll(url.QueryEscape(s), "+", "%20"))
	}
	return v.Encode()
}

func TestMetadata(t *testing.T) {
	// As captured of SDK 2.51.
	q, err := url.ParseQuery("metadata=k%2525201%3Dv%2525262")
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]map[string]string{
		q.Get("metadata"): {"k 1": "v&2"},
		"":                nil,
		"a=b":             {"a": "b"},
		"a=b&c=d=e":       {"a": "b", "c": "d=e"},
		"a=":              {"a": ""},
		"a=100%":          {"a": "100%"},
		"user=x%20y":      {"user": "x y"},
		encoded(map[string]string{"a+b": "50% & +"}): {"a+b": "50% & +"},
		encoded(map[string]string{"ü=1": "%41"}):     {"ü=1": "%41"},
	} {
		if got, err := parseMetadata(in); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add("k 1", "v&2", "k%25201=v%25262")
	f.Add("a", "100%", "a=100%")
	f.Add("", "", "&&==%%")
	f.Fuzz(func(t *testing.T, key, value, raw string) {
		if _, err := parseMetadata(raw); err != nil && !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", raw, err)
		}
		if key == "" {
			return
		}
		// What an SDK sends is what it means.
		want := map[string]string{key: value}
		if got, err := parseMetadata(encoded(want)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %q, %v", want, got, err)
		}
	})
}

func FuzzCursor(f *testing.F) {
	l := listOf("sandboxes", lifecycle.Filter{})
	f.Add(l.cursor(lifecycle.Cursor{At: time.Unix(1, 2), ID: "iabc"}), int64(1), "iabc")
	f.Add("", int64(-1), "tplsnap:default")
	f.Add("AAAA", int64(1<<62), "a b")
	f.Fuzz(func(t *testing.T, raw string, nano int64, id string) {
		c, err := l.place(raw)
		if err != nil && !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", raw, err)
		}
		if err == nil && raw != "" && (c.ID == "" || len(c.ID) > maxCursor) {
			t.Errorf("%q: %v", raw, c)
		}
		if _, err := parseRef("", id); err != nil || len(id) > 100 || strings.ContainsFunc(id, func(r rune) bool { return r >= utf8.RuneSelf }) {
			return
		}
		want := lifecycle.Cursor{At: time.Unix(0, nano).UTC(), ID: id}
		if got, err := l.place(l.cursor(want)); err != nil || got != want {
			t.Errorf("%v: %v, %v", want, got, err)
		}
		if _, err := listOf("snapshots", lifecycle.Filter{}).place(l.cursor(want)); err == nil {
			t.Errorf("%v is taken for a place in another list", want)
		}
	})
}

// FuzzIDs: what is let through is made of what may be part of a path or a log.
func FuzzIDs(f *testing.F) {
	for _, s := range []string{"iabc", "iabc-00000000", "../..", "team/name:tag", "a:b:c", "İ", "K:ſ"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := parseSandboxID("sandboxID", s); err == nil {
			if id == "" || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" || !strings.HasPrefix(s, id) {
				t.Errorf("%q is %q", s, id)
			}
		} else if !errdefs.IsInvalidArgument(err) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", s, err)
		}
		if r, err := parseRef("templateID", s); err == nil {
			again, err := parseRef("templateID", r.String())
			if err != nil || again != r || strings.Trim(r.String(), "abcdefghijklmnopqrstuvwxyz0123456789-_./:") != "" || strings.Count(r.String(), "/") > 1 {
				t.Errorf("%q is %q", s, r)
			}
		} else if !errdefs.IsInvalidArgument(err) || strings.Contains(err.Error(), "\n") || len(err.Error()) > 3*maxRef {
			t.Errorf("%q: %v", s, err)
		}
	})
}

// FuzzCreate: no body is an internal error, and none that is refused gets to the engine.
func FuzzCreate(f *testing.F) {
	for _, s := range []string{`{"templateID":"base"}`, `{"templateID":"base","network":{"allowOut":["1.1.1.1"],"maskRequestHost":"a:${PORT}"},"envVars":{"A":"b"},"autoResume":{"enabled":true},"timeout":1}`, `[`, `{"templateID":"base","network":{"denyOut":["::ffff:1.1.1.1/99"]}}`} {
		f.Add([]byte(s))
	}
	s, engine := newTestServer(f, nil)
	h := s.Handler()
	f.Fuzz(func(t *testing.T, body []byte) {
		engine.last = nil
		w := ask(h, "POST", "/v2/sandboxes", string(body))
		if w.Code != 201 && (w.Code != 400 && w.Code != 404 || w.Code == 400 && engine.last != nil) {
			t.Errorf("%q: %d %s", body, w.Code, w.Body)
		}
		if !json.Valid(w.Body.Bytes()) {
			t.Errorf("%q: %s", body, w.Body)
		}
	})
}
