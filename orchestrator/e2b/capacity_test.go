package e2b

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

func TestCapacity(t *testing.T) {
	s, _ := newTestServer(t, nil)
	ask := func(key, path string) (int, string) {
		t.Helper()
		r := httptest.NewRequest(http.MethodGet, path, nil)
		if key != "" {
			r.Header.Set("X-API-KEY", key)
		}
		rec := httptest.NewRecorder()
		s.Handler().ServeHTTP(rec, r)
		return rec.Code, strings.TrimSpace(rec.Body.String())
	}
	code, body := ask(testKey, "/capacity?template=name2")
	const want = `{"cpu":{"total":4,"reserved":3.5,"used":1.5,"free":0.5},"memory":{"total":900,"reserved":100,"used":600,"free":300},"disk":{"total":2000,"reserved":50,"used":500,"free":1500},` +
		`"spare":{"cpu":0.5,"memory":10,"disk":5},"pressure":{"cpu":12.5,"memory":0,"io":0},"running":7,"paused":3,` +
		`"team":{"teamID":"blue","used":{"running":2,"paused":1,"vcpus":4,"memory":60,"disk":30},"limits":{"running":5,"vcpus":0,"memory":0,"disk":0,"snapshots":0,"createsPerMinute":0}},` +
		`"templates":[{"templateID":"tpl2","names":["blue/name2"],"profile":"disposable","cpuCount":2,"memoryMB":512,"diskSizeMB":1024,"reserved":{"cpu":0.25,"memory":96,"disk":8},"room":2,"short":"host_cpu"}]}`
	if code != http.StatusOK || body != want {
		t.Errorf("%d\n%s, want\n%s", code, body, want)
	}
	code, body = ask(testKey, "/capacity")
	var all struct {
		Templates []json.RawMessage `json:"templates"`
	}
	if err := json.Unmarshal([]byte(body), &all); err != nil || code != http.StatusOK || len(all.Templates) != 3 {
		t.Errorf("of all templates: %d %s, %v", code, body, err)
	}
	for path, want := range map[string]int{"/capacity?template=nope": 404, "/capacity?template=a%20b": 400, "/capacity?templates=name1": 400} {
		if code, body := ask(testKey, path); code != want {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, _ := ask("", "/capacity"); code != http.StatusUnauthorized {
		t.Errorf("without a key: %d", code)
	}
	if code, body := ask(otherKey, "/capacity?template=name2"); code != http.StatusNotFound {
		t.Errorf("another team's template: %d %s", code, body)
	}
}

// TestProfile: a create says in its metadata what is reserved.
func TestProfile(t *testing.T) {
	s, engine := newTestServer(t, nil)
	for profile, want := range map[string]int{"resident": 201, "disposable": 201, "Resident": 400, "any": 400} {
		body, err := json.Marshal(map[string]any{"templateID": "base", "metadata": map[string]string{profileKey: profile}})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPost, "/v2/sandboxes", strings.NewReader(string(body)))
		r.Header.Set("X-API-KEY", testKey)
		rec := httptest.NewRecorder()
		s.Handler().ServeHTTP(rec, r)
		if rec.Code != want || want == 400 && !strings.Contains(rec.Body.String(), "cube.profile") {
			t.Errorf("%s: %d %s", profile, rec.Code, rec.Body)
		}
		if c, _ := engine.last.(lifecycle.Create); want == 201 && (c.Profile != admission.Profile(profile) || c.Metadata[profileKey] != profile) {
			t.Errorf("%s: %+v", profile, c)
		}
	}
}
