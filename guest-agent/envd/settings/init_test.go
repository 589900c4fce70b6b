package settings

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

func newStore(t *testing.T) *Store {
	t.Helper()
	dir := t.TempDir()
	passwd := filepath.Join(dir, "passwd")
	must(t, os.WriteFile(passwd, []byte("root:x:0:0::/root:\nuser:x:1000:1000::/home/user:\n"), 0o600))
	s := &Store{Users: users.Database{Passwd: passwd, Group: "/nonexistent"}, Dir: filepath.Join(dir, "run")}
	must(t, s.Load(Settings{User: "root"}))
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func call(s *Store, token, body string) (int, string) {
	r := httptest.NewRequest(http.MethodPost, "/init", strings.NewReader(body))
	if token != "" {
		r.Header.Set(auth.Header, token)
	}
	w := httptest.NewRecorder()
	s.Init(w, r)
	return w.Code, w.Body.String()
}

func TestInit(t *testing.T) {
	s := newStore(t)
	s.Hosts = filepath.Join(t.TempDir(), "hosts")
	if code, body := call(s, "", `{"accessToken":"one","envVars":{"A":"1","E2B_SANDBOX_ID":"other"},"defaultUser":"user","defaultWorkdir":"/w","sandboxID":"ibox","templateID":"base","lifecycleID":"l"}`); code != 204 {
		t.Fatal(code, body)
	}
	got := s.Get()
	if got.Token != "one" || got.User != "user" || got.Workdir != "/w" || got.SandboxID != "ibox" {
		t.Errorf("%+v", got)
	}
	if env := got.Environ(); env["A"] != "1" || env["E2B_SANDBOX_ID"] != "ibox" || env["E2B_TEMPLATE_ID"] != "base" || env["E2B_SANDBOX"] != "true" {
		t.Errorf("%v", env)
	}
	name, err := os.Hostname()
	must(t, err)
	if hosts, err := os.ReadFile(s.Hosts); err != nil || !strings.Contains(string(hosts), "\t"+name+"\t") {
		t.Errorf("the hosts are %q, %v", hosts, err)
	}
	// With variables in place of those before; what isn't given stays.
	if code, body := call(s, "one", `{"envVars":{"B":"2"}}`); code != 204 {
		t.Fatal(code, body)
	}
	if got := s.Get(); got.Env["A"] != "" || got.Env["B"] != "2" || got.Token != "one" || got.User != "user" {
		t.Errorf("%+v", got)
	}
	if code, _ := call(s, "one", ""); code != 204 || s.Get().Env["B"] != "2" {
		t.Error(code)
	}
}

func TestInitTakesTheToken(t *testing.T) {
	s := newStore(t)
	call(s, "", `{"accessToken":"one"}`)
	for _, c := range []struct {
		header, body string
		want         int
	}{
		{"", `{}`, 401}, {"", `{"accessToken":"two"}`, 401}, {"two", `{"accessToken":"two"}`, 401}, {"", `{"accessToken":""}`, 401},
		{"", `{"accessToken":"one"}`, 204}, {"one", `{}`, 204}, {"one", `{"accessToken":"two"}`, 204}, {"one", `{}`, 401}, {"two", `{"accessToken":""}`, 204}, {"", `{}`, 204},
	} {
		if code, body := call(s, c.header, c.body); code != c.want {
			t.Errorf("%q, %s: %d %s, want %d", c.header, c.body, code, body, c.want)
		}
	}
}

func TestInitRefuses(t *testing.T) {
	for body, want := range map[string]string{
		`{"hyperloopIP":"x"}`:                    "hyperloopIP",
		`{"volumeMounts":[]}`:                    "volumeMounts",
		`{"envVars":{"A=":"x"}}`:                 "envVars",
		`{"envVars":{"":"x"}}`:                   "envVars",
		`{"envVars":{"A":"\u0000"}}`:             "envVars",
		`{"envVars":{"A":1}}`:                    "envVars",
		`{"defaultUser":"nobody-here"}`:          "defaultUser",
		`{"defaultWorkdir":"\u0000"}`:            "defaultWorkdir",
		`{"timestamp":"yesterday"}`:              "parsing time",
		`{"accessToken":"a","envVars":{"":"x"}}`: "envVars",
		`[`:                                      "body of /init",
		`{"envVars":{"A":"` + strings.Repeat("x", maxBody) + `"}}`: "too large",
	} {
		s := newStore(t)
		code, got := call(s, "", body)
		if code != 400 || !strings.Contains(got, want) {
			t.Errorf("%.60s: %d %s; want %q", body, code, got, want)
		}
		if s.Get().Token != "" {
			t.Errorf("%.60s has set the token", body)
		}
	}
}

func TestInitTime(t *testing.T) {
	s := newStore(t)
	var set []time.Time
	s.SetClock = func(to time.Time) error { set = append(set, to); return nil }
	at := func(d time.Duration) string { return time.Now().Add(d).Format(time.RFC3339Nano) }
	for _, c := range []struct {
		ahead time.Duration // the request's, of the clock
		steps bool
	}{{-4 * time.Second, false}, {-time.Hour, true}, {10 * time.Millisecond, false}, {time.Second, true}, {time.Hour, true}} {
		s.now.Stamp, set = time.Time{}, nil
		if code, body := call(s, "", `{"timestamp":"`+at(c.ahead)+`"}`); code != 204 || (len(set) == 1) != c.steps {
			t.Errorf("%v: %d %s, clock set to %v", c.ahead, code, body, set)
		}
	}
	// Late ones change nothing; the same one twice is one.
	stamp := at(-time.Minute)
	s.now.Stamp = time.Time{}
	for _, c := range []struct {
		stamp, value string
		code         int
		want         string
	}{{stamp, "1", 204, "1"}, {at(-time.Hour), "late", 409, "1"}, {stamp, "1", 204, "1"}, {at(0), "2", 204, "2"}} {
		if code, body := call(s, "", `{"timestamp":"`+c.stamp+`","envVars":{"A":"`+c.value+`"}}`); code != c.code || s.Get().Env["A"] != c.want {
			t.Errorf("%+v: %d %s, %+v", c, code, body, s.Get())
		}
	}
	// One that was taken as the clock was ahead keeps out none of those after it.
	s.now.Stamp = time.Now().Add(time.Hour)
	if code, body := call(s, "", `{"timestamp":"`+at(0)+`","envVars":{"A":"3"}}`); code != 204 || s.Get().Env["A"] != "3" {
		t.Errorf("%d %s, %+v", code, body, s.Get())
	}
}

// What was set is there for a daemon that is started anew, and only root reads the secret of it.
func TestKept(t *testing.T) {
	s := newStore(t)
	call(s, "one", `{"accessToken":"one","sandboxID":"ibox"}`)
	next := &Store{Users: s.Users, Dir: s.Dir}
	must(t, next.Load(Settings{User: "root"}))
	if got := next.Get(); got.Token != "one" || got.SandboxID != "ibox" {
		t.Errorf("%+v", got)
	}
	info, err := os.Stat(filepath.Join(s.Dir, file))
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Error(info.Mode())
	}
	fact, err := os.ReadFile(filepath.Join(s.Dir, ".E2B_SANDBOX_ID"))
	if must(t, err); string(fact) != "ibox" {
		t.Errorf("%q", fact)
	}
	must(t, Forget(s.Dir))
	must(t, Forget(s.Dir))
	must(t, next.Load(Settings{User: "root"}))
	if next.Get().Token != "" {
		t.Error("a token outlives the boot")
	}
}
