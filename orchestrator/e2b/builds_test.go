package e2b

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// builder makes templates of nothing: it tells of each step, reads what a COPY copies, and fails where a RUN says "fail". One that
// says "wait" goes on when hold is closed.
type builder struct {
	mu      sync.Mutex
	recipes []templates.Recipe
	hold    chan struct{}
}

func (b *builder) Make(ctx context.Context, r templates.Recipe, files templates.Files, tell templates.Report, _ string) (templates.Made, error) {
	b.mu.Lock()
	b.recipes = append(b.recipes, r)
	hold := b.hold
	b.mu.Unlock()
	tell("base", lifecycle.Info, "FROM "+r.Image)
	for i, s := range r.Steps {
		n := strconv.Itoa(i + 1)
		tell(n, lifecycle.Info, fmt.Sprintf("%s %q", s.Type, s.Args))
		switch {
		case s.Type == templates.Copy:
			f, err := files.Open(ctx, r.Team, s.Files)
			if err != nil {
				return templates.Made{}, err
			}
			b, err := io.ReadAll(f)
			f.Close()
			if err != nil {
				return templates.Made{}, err
			}
			tell(n, lifecycle.Debug, fmt.Sprintf("%x", b[:2]))
		case s.Args[0] == "fail":
			tell(n, lifecycle.Error, "no such thing")
			return templates.Made{}, &templates.Failure{Step: n, What: "RUN fail", Last: []string{"looking", "no such thing"}, Err: errors.New("exit status 3")}
		case s.Args[0] == "wait":
			select {
			case <-hold:
			case <-ctx.Done():
				return templates.Made{}, context.Cause(ctx)
			}
		}
	}
	if r.Ready == "never" {
		return templates.Made{}, &templates.Failure{Step: "finalize", What: r.Ready, Ready: "exit status 1", Err: errors.New("not within 10m0s")}
	}
	return templates.Made{Settings: db.Settings{EnvdVersion: "0.6.13"}, DiskMB: r.DiskMB, Digest: "sha256:one", Builder: "test", Inputs: "in"}, nil
}

// archive is a tar of one file, gzipped.
func archive(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, err := range []error{w.WriteHeader(&tar.Header{Name: "f.txt", Mode: 0o644, Size: 2}), func() error { _, err := w.Write([]byte("hi")); return err }(), w.Close(), z.Close()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

const sum = "29e1000000000000000000000000000000000000000000000000000000000000"

// ended polls a build as SDKs do, until all of it is told.
func (w *whole) ended(t *testing.T, key string, b createdBuildBody) (last buildStatusBody, entries []logEntryBody) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		last = buildStatusBody{}
		w.do(t, key, "GET", fmt.Sprintf("/templates/%s/builds/%s/status?logsOffset=%d", b.TemplateID, b.BuildID, len(entries)), ``, 200, &last)
		entries = append(entries, last.LogEntries...)
		if (last.Status == "ready" || last.Status == "error") && len(last.LogEntries) == 0 {
			return last, entries
		}
		if time.Now().After(deadline) {
			t.Fatalf("the build is still %+v", last)
		}
		time.Sleep(time.Millisecond)
	}
}

// begin asks for a build and says what it is of.
func (w *whole) begin(t *testing.T, key, name, plan string) (b createdBuildBody) {
	t.Helper()
	w.do(t, key, "POST", "/v3/templates", `{"name":"`+name+`"}`, 202, &b)
	if rec := w.do(t, key, "POST", "/v2/templates/"+b.TemplateID+"/builds/"+b.BuildID, plan, 202, nil); rec.Body.Len() > 0 {
		t.Errorf("the answer has a body: %s", rec.Body)
	}
	return b
}

// put uploads to a link, without a key.
func (w *whole) put(link string, body []byte) *httptest.ResponseRecorder {
	u, err := url.Parse(link)
	if err != nil {
		panic(err)
	}
	rec := httptest.NewRecorder()
	w.ServeHTTP(rec, httptest.NewRequest("PUT", u.RequestURI(), bytes.NewReader(body)))
	return rec
}

// TestBuild: the way of E2B's SDKs from a name to a sandbox.
func TestBuild(t *testing.T) {
	w := newWhole(t)
	var b createdBuildBody
	w.do(t, w.blue, "POST", "/v3/templates", `{"name":"App:V1","tags":["v1","stable"],"cpuCount":4,"memoryMB":512,"minFreeDiskMb":100}`, 202, &b)
	if b.Names[0] != "blue/app" || b.Aliases[0] != "app" || strings.Join(b.Tags, " ") != "v1 stable" || b.Public {
		t.Errorf("%+v", b)
	}
	var alias aliasBody
	w.do(t, w.blue, "GET", "/templates/aliases/app", ``, 200, &alias)
	if alias.TemplateID != b.TemplateID {
		t.Errorf("%+v", alias)
	}
	at := "/templates/" + b.TemplateID
	refused(t, w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"app"}`, 404, nil), 404, "template 'app' not found")

	// Files are uploaded once, by a link.
	plan := `{"fromImage":"python:3","steps":[{"type":"ENV","args":["A","1"]},{"type":"COPY","args":["f.txt","/app/","root","0644"],"filesHash":"` + sum + `","forceUpload":true,"gzip":true},
		{"type":"RUN","args":["make","root"],"force":true}],"startCmd":"serve","force":false}`
	refused(t, w.do(t, w.blue, "POST", "/v2"+at+"/builds/"+b.BuildID, plan, 400, nil), 400, "the files "+sum)
	var link linkBody
	w.do(t, w.blue, "GET", at+"/files/"+sum, ``, 201, &link)
	if link.Present || !strings.HasPrefix(link.URL, "http://example.com"+at+"/files/"+sum+"?") {
		t.Errorf("%+v", link)
	}
	if rec := w.put(link.URL, archive(t)); rec.Code != 204 {
		t.Fatalf("%d %s", rec.Code, rec.Body)
	}
	w.do(t, w.blue, "GET", at+"/files/"+sum, ``, 201, &link)
	if !link.Present {
		t.Errorf("%+v", link)
	}
	w.do(t, w.blue, "POST", "/v2"+at+"/builds/"+b.BuildID, plan, 202, nil)
	refused(t, w.do(t, w.blue, "POST", "/v2"+at+"/builds/"+b.BuildID, plan, 409, nil), 409, "already")
	last, entries := w.ended(t, w.blue, b)
	if last.Status != "ready" || len(entries) != 5 || entries[0].Step != "base" || entries[2].Step != "2" || entries[3].Level != "debug" || entries[3].Message != "1f8b" {
		t.Errorf("%+v, %+v", last, entries)
	}
	if r := w.builder.recipes[0]; r.CPUs != 4 || r.MemoryMB != 512 || r.DiskMB != 612 || !r.Steps[2].Force || r.Run != "serve" || r.Ready != "sleep 20" || r.Team != "blue" {
		t.Errorf("%+v", r)
	}
	var sb sandboxBody
	w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"app:stable"}`, 201, &sb)
	if sb.TemplateID != b.TemplateID {
		t.Errorf("%+v", sb)
	}
	w.do(t, w.blue, "GET", at+"/builds/"+b.BuildID+"/status?level=info&limit=2&logsOffset=3", ``, 200, &last)
	if len(last.LogEntries) != 1 || last.LogEntries[0].Step != "3" || last.Logs[0] != last.LogEntries[0].Message {
		t.Errorf("%+v", last)
	}
	var logs struct{ Logs []logEntryBody }
	w.do(t, w.blue, "GET", at+"/builds/"+b.BuildID+"/logs?direction=backward&limit=2&source=persistent", ``, 200, &logs)
	if len(logs.Logs) != 2 || logs.Logs[0].Step != "3" {
		t.Errorf("%+v", logs)
	}
	w.do(t, w.blue, "GET", fmt.Sprintf("%s/builds/%s/logs?cursor=%d", at, b.BuildID, time.Now().Add(time.Hour).UnixMilli()), ``, 200, &logs)
	if len(logs.Logs) != 0 {
		t.Errorf("%+v", logs)
	}

	// Another build of it that fails leaves what there is, and says why.
	failed := w.begin(t, w.blue, "app:v1", `{"fromImage":"python:3","steps":[{"type":"RUN","args":["true"]},{"type":"RUN","args":["fail"]}]}`)
	if failed.TemplateID != b.TemplateID || failed.BuildID == b.BuildID {
		t.Errorf("%+v", failed)
	}
	last, _ = w.ended(t, w.blue, failed)
	if last.Status != "error" || last.Reason == nil || last.Reason.Step != "2" || !strings.Contains(last.Reason.Message, "exit status 3") || len(last.Reason.LogEntries) != 2 || last.Reason.LogEntries[1].Message != "no such thing" {
		t.Errorf("%+v %+v", last, last.Reason)
	}
	last, _ = w.ended(t, w.blue, w.begin(t, w.blue, "app:v1", `{"fromImage":"python:3","startCmd":"serve","readyCmd":"never"}`))
	if last.Status != "error" || last.Reason.Step != "finalize" || !strings.Contains(last.Reason.Message, "isn't ready: exit status 1") {
		t.Errorf("%+v", last.Reason)
	}
	w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"app:v1"}`, 201, nil)
	var list []templateBody
	w.do(t, w.blue, "GET", "/v2/templates", ``, 200, &list)
	if list[0].TemplateID != b.TemplateID || list[0].BuildStatus != "error" || list[0].BuildCount != 3 || list[0].SpawnCount != 2 {
		t.Errorf("%+v", list[0])
	}
	var whole templateBuildsBody
	w.do(t, w.blue, "GET", at, ``, 200, &whole)
	if len(whole.Builds) != 3 || whole.Builds[2].Status != "ready" || whole.Builds[2].EnvdVersion != "0.6.13" || whole.Builds[0].EnvdVersion != "" || whole.Builds[0].FinishedAt == nil {
		t.Errorf("%+v", whole.Builds)
	}

	// A template of a template.
	last, _ = w.ended(t, w.blue, w.begin(t, w.blue, "child", `{"fromTemplate":"app:stable","steps":[{"type":"RUN","args":["true"]}]}`))
	if r := w.builder.recipes[len(w.builder.recipes)-1]; last.Status != "ready" || r.Base == nil || r.Base.ID != b.BuildID {
		t.Errorf("%+v of %+v", last, r)
	}
	var none createdBuildBody
	w.do(t, w.blue, "POST", "/v3/templates", `{"name":"child"}`, 202, &none)
	refused(t, w.do(t, w.blue, "POST", "/v2/templates/child/builds/"+none.BuildID, `{"fromTemplate":"nope"}`, 404, nil), 404, "fromTemplate: template 'nope' not found")

	// What was made without the API has a status, too.
	w.do(t, w.blue, "GET", "/templates/name1/builds/build-name1/status", ``, 200, &last)
	if last.Status != "ready" || len(last.LogEntries) != 0 {
		t.Errorf("%+v", last)
	}
	var legacy templateBody
	w.do(t, w.blue, "POST", "/v2/templates", `{"alias":"older","cpuCount":1}`, 202, &legacy)
	if legacy.BuildStatus != "waiting" || legacy.CPUCount != 1 || legacy.MemoryMB != 1024 || legacy.BuildCount != 1 || legacy.Aliases[0] != "older" {
		t.Errorf("%+v", legacy)
	}
}

// TestBuildRefused: what can't be built, uploaded or changed is told before anything is done, and others' templates are theirs.
func TestBuildRefused(t *testing.T) {
	w := newWhole(t)
	for _, c := range []struct {
		body   string
		status int
		says   string
	}{
		{`{"name":"x","cpuCount":3}`, 400, "CPU count must be 1 or an even number"},
		{`{"name":"x","cpuCount":34}`, 400, "CPU count must be at most 32"},
		{`{"name":"x","cpuCount":18}`, 400, "vm.max_vcpus"},
		{`{"name":"x","memoryMB":513}`, 400, "Memory must be divisible by 2"},
		{`{"name":"x","memoryMB":64}`, 400, "memoryMB: "},
		{`{"name":"x","memoryMB":9000}`, 400, "vm.max_memory"},
		{`{"name":"x","minFreeDiskMb":70000}`, 400, "minFreeDiskMb: "},
		{`{"name":"x","tags":["a b"]}`, 400, "tags[0]: "},
		{`{"name":"x","teamID":"green"}`, 403, "teamID: "},
		{`{"name":"green/x"}`, 403, "of another team"},
	} {
		refused(t, w.do(t, w.blue, "POST", "/v3/templates", c.body, c.status, nil), c.status, c.says)
	}
	var b createdBuildBody
	w.do(t, w.blue, "POST", "/v3/templates", `{"alias":"app"}`, 202, &b)
	at := "/v2/templates/app/builds/" + b.BuildID
	for body, says := range map[string]string{
		`{}`:                                   "fromImage: ",
		`{"fromImage":"a b"}`:                  "fromImage: ",
		`{"fromImage":"a","fromTemplate":"b"}`: "fromTemplate: ",
		`{"fromTemplate":"a/b/c"}`:             "fromTemplate: ",
		`{"fromTemplate":"base","fromImageRegistry":{"type":"registry","username":"a","password":"b"}}`: "fromImageRegistry: ",
		`{"fromImage":"a","startCmd":"x\u0000"}`:                                                        "startCmd: ",
		`{"fromImage":"a","steps":[{"type":"ADD","args":["x"]}]}`:                                       "steps[0]",
		`{"fromImage":"a","steps":[{"type":"RUN","args":["true"]},{"type":"RUN"}]}`:                     "steps[1]",
		`{"fromImage":"a","steps":[{"type":"RUN","args":[" "]}]}`:                                       "steps[0]",
		`{"fromImage":"a","steps":[{"type":"RUN","args":["a","b","c"]}]}`:                               "steps[0]",
		`{"fromImage":"a","steps":[{"type":"ENV","args":["A"]}]}`:                                       "steps[0]",
		`{"fromImage":"a","steps":[{"type":"ENV","args":["A=B","c"]}]}`:                                 "steps[0]",
		`{"fromImage":"a","steps":[{"type":"USER","args":["a b"]}]}`:                                    "steps[0]",
		`{"fromImage":"a","steps":[{"type":"WORKDIR","args":[""]}]}`:                                    "steps[0]",
		`{"fromImage":"a","steps":[{"type":"COPY","args":["a","b"]}]}`:                                  "steps[0]",
		`{"fromImage":"a","steps":[{"type":"COPY","args":["a","b","","9"],"filesHash":"` + sum + `"}]}`: "steps[0]",
		`{"fromImage":"a","steps":[{"type":"COPY","args":["a","b","",""],"filesHash":"../x"}]}`:         "steps[0]",
		`{"fromImage":"a","steps":[{"type":"COPY","args":["a","b","",""],"filesHash":"` + sum + `"}]}`:  "aren't here",
	} {
		refused(t, w.do(t, w.blue, "POST", at, body, 400, nil), 400, says)
	}
	if len(w.builder.recipes) > 0 {
		t.Errorf("the builder was asked for %+v", w.builder.recipes)
	}

	// Others' templates: those that they may not use aren't there, those that they may aren't theirs to change.
	for _, do := range [][3]string{
		{"POST", "/v2/templates/blue%2Fapp/builds/" + b.BuildID, `{"fromImage":"a"}`}, {"GET", "/templates/blue%2Fapp/builds/" + b.BuildID + "/status"}, {"GET", "/templates/blue%2Fapp/builds/" + b.BuildID + "/logs"},
		{"GET", "/templates/blue%2Fapp/files/" + sum}, {"PATCH", "/v2/templates/blue%2Fapp", `{"public":true}`}, {"POST", "/templates/tags", `{"target":"blue/app","tags":["x"]}`},
		{"DELETE", "/templates/tags", `{"name":"blue/app","tags":["x"]}`}, {"DELETE", "/templates/blue%2Fapp"}, {"GET", "/templates/aliases/blue%2Fapp"},
	} {
		refused(t, w.do(t, w.green, do[0], do[1], do[2], 404, nil), 404, "not found")
	}
	for _, do := range [][3]string{{"PATCH", "/v2/templates/base", `{"public":false}`}, {"POST", "/templates/tags", `{"target":"base","tags":["x"]}`}, {"GET", "/templates/base/files/" + sum},
		{"GET", "/templates/base/builds/build-base/status"}, {"DELETE", "/templates/tags", `{"name":"base","tags":["x"]}`}} {
		refused(t, w.do(t, w.green, do[0], do[1], do[2], 403, nil), 403, "another team")
	}
	refused(t, w.do(t, w.blue, "GET", "/templates/app/builds/"+sum+"/status", ``, 404, nil), 404, "build '"+sum+"' not found")
	refused(t, w.do(t, w.blue, "GET", "/templates/name1/builds/"+b.BuildID+"/status", ``, 404, nil), 404, "not found")

	// Bounds: of the team's builds that aren't done, and of its templates.
	w.do(t, w.blue, "POST", "/v3/templates", `{"name":"app:other"}`, 202, nil)
	w.do(t, w.blue, "POST", "/v3/templates", `{"name":"app2"}`, 202, nil)
	rec := w.do(t, w.blue, "POST", "/v3/templates", `{"name":"app3"}`, 429, nil)
	refused(t, rec, 429, "team blue has 3 builds under way, which is all that it may")
	if rec.Header().Get("Retry-After") == "" {
		t.Error("there is no Retry-After")
	}
	w.do(t, w.green, "POST", "/v3/templates", `{"name":"app3"}`, 202, nil)

	// A snapshot's name isn't a template's.
	var sb sandboxBody
	w.do(t, w.green, "POST", "/v2/sandboxes", `{"templateID":"base"}`, 201, &sb)
	w.do(t, w.green, "POST", "/sandboxes/"+sb.SandboxID+"/snapshots", `{"name":"snap"}`, 201, nil)
	refused(t, w.do(t, w.green, "POST", "/v3/templates", `{"name":"snap"}`, 409, nil), 409, "the name snap is a snapshot's")
}

// TestUpload: only a link that was given out takes a file, and only one that is a tar of bounded size.
func TestUpload(t *testing.T) {
	w := newWhole(t)
	var b createdBuildBody
	w.do(t, w.blue, "POST", "/v3/templates", `{"name":"app"}`, 202, &b)
	refused(t, w.do(t, w.blue, "GET", "/templates/app/files/xyz", ``, 400, nil), 400, "hash: ")
	var link linkBody
	w.do(t, w.blue, "GET", "/templates/app/files/"+sum, ``, 201, &link)
	whole := archive(t)
	for _, c := range []struct {
		link   string
		body   []byte
		status int
		says   string
	}{
		{strings.Replace(link.URL, "signature=", "signature=0", 1), whole, 403, "link"},
		{strings.Replace(link.URL, "team=blue", "team=green", 1), whole, 403, "link"},
		{strings.Replace(link.URL, sum, strings.Repeat("0", 64), 1), whole, 403, "link"},
		{strings.Replace(link.URL, "expires=", "expires=9", 1), whole, 403, "link"},
		{strings.Split(link.URL, "?")[0], whole, 403, "link"},
		{link.URL, nil, 400, "isn't a tar"},
		{link.URL, []byte("hello"), 400, "isn't a tar"},
		{link.URL, whole[:len(whole)-4], 400, "isn't a tar"},
		{link.URL, append(bytes.Clone(whole), "more"...), 400, "isn't a tar"},
		{link.URL, bytes.Repeat([]byte{1}, 64<<10+1), 413, "64KiB"},
	} {
		refused(t, w.put(c.link, c.body), c.status, c.says)
	}
	w.do(t, w.blue, "GET", "/templates/app/files/"+sum, ``, 201, &link)
	if link.Present {
		t.Error("something is there")
	}
	// Once more is as good as once.
	for range 2 {
		if rec := w.put(link.URL, whole); rec.Code != 204 {
			t.Errorf("%d %s", rec.Code, rec.Body)
		}
	}
	// By way of a proxy it is told where that is.
	r := httptest.NewRequest("GET", "/templates/app/files/"+sum, nil)
	for k, v := range map[string]string{"X-API-KEY": w.blue, "X-Forwarded-Proto": "https", "X-Forwarded-Host": "api.example.test:8443"} {
		r.Header.Set(k, v)
	}
	rec := httptest.NewRecorder()
	if w.ServeHTTP(rec, r); !strings.Contains(rec.Body.String(), `"url":"https://api.example.test:8443/templates/`) {
		t.Errorf("%s", rec.Body)
	}
}

// TestTags: tags and who may use a template.
func TestTags(t *testing.T) {
	w := newWhole(t)
	first := w.begin(t, w.blue, "app:v1", `{"fromImage":"a"}`)
	w.ended(t, w.blue, first)
	var tagged taggedBody
	w.do(t, w.blue, "POST", "/templates/tags", `{"target":"app:v1","tags":["stable","production"]}`, 201, &tagged)
	if tagged.BuildID != first.BuildID || len(tagged.Tags) != 2 {
		t.Errorf("%+v", tagged)
	}
	refused(t, w.do(t, w.blue, "POST", "/templates/tags", `{"target":"app","tags":["x"]}`, 404, nil), 404, "template 'app' not found")
	second := w.begin(t, w.blue, "app:stable", `{"fromImage":"a"}`)
	w.ended(t, w.blue, second)
	tags := func() string {
		var all []tagBody
		w.do(t, w.blue, "GET", "/templates/app/tags", ``, 200, &all)
		s := ""
		for _, one := range all {
			s += one.Tag + map[string]string{first.BuildID: "=1 ", second.BuildID: "=2 "}[one.BuildID]
		}
		return s
	}
	if got := tags(); got != "production=1 stable=2 v1=1 " {
		t.Errorf("tags %s", got)
	}
	w.do(t, w.blue, "DELETE", "/templates/tags", `{"name":"app","tags":["v1","production"]}`, 204, nil)
	refused(t, w.do(t, w.blue, "DELETE", "/templates/tags", `{"name":"app","tags":["v1"]}`, 404, nil), 404, "template 'app:v1' not found")
	refused(t, w.do(t, w.blue, "DELETE", "/templates/tags", `{"name":"app","tags":["stable"]}`, 400, nil), 400, "no tag left")
	if got := tags(); got != "stable=2 " {
		t.Errorf("tags %s", got)
	}

	refused(t, w.do(t, w.green, "POST", "/v2/sandboxes", `{"templateID":"blue/app:stable"}`, 404, nil), 404, "not found")
	var names struct{ Names []string }
	w.do(t, w.blue, "PATCH", "/v2/templates/"+first.TemplateID, `{"public":true}`, 200, &names)
	if len(names.Names) != 1 || names.Names[0] != "blue/app" {
		t.Errorf("%+v", names)
	}
	var sb sandboxBody
	w.do(t, w.green, "POST", "/v2/sandboxes", `{"templateID":"blue/app:stable"}`, 201, &sb)
	refused(t, w.do(t, w.blue, "DELETE", "/templates/app", ``, 400, nil), 400, "can't be deleted")
	w.do(t, w.green, "DELETE", "/sandboxes/"+sb.SandboxID, ``, 204, nil)
	w.do(t, w.blue, "PATCH", "/templates/app", `{"public":false}`, 200, nil)
	w.do(t, w.green, "GET", "/templates/aliases/blue%2Fapp", ``, 404, nil)

	// With the template goes what is built for it.
	w.builder.mu.Lock()
	w.builder.hold = make(chan struct{})
	w.builder.mu.Unlock()
	going := w.begin(t, w.blue, "app", `{"fromImage":"a","steps":[{"type":"RUN","args":["wait"]}]}`)
	w.do(t, w.blue, "DELETE", "/templates/app", ``, 204, nil)
	w.do(t, w.blue, "GET", "/templates/"+going.TemplateID+"/builds/"+going.BuildID+"/status", ``, 404, nil)
	w.ended(t, w.blue, w.begin(t, w.blue, "next", `{"fromImage":"a"}`)) // it isn't kept from its turn
}
