package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestBatchFromOutside(t *testing.T) {
	var asked map[string]any
	answer := ""
	run := outside(t, func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		asked = nil
		if err != nil || r.Method != "POST" || r.URL.Path != "/batch" || r.Header.Get("X-API-KEY") != "e2b_secret" || json.Unmarshal(b, &asked) != nil {
			t.Errorf("%s %s %s %v", r.Method, r.URL, b, err)
		}
		fmt.Fprint(w, answer)
	})
	const good = `{"type":"progress","count":2,"done":0,"running":1}
{"type":"result","index":1,"sandboxID":"i1","status":"ok","exitCode":0,"stdout":"one\ntwo\u001b[2J\n\n","stderr":"","waitMs":10,"createMs":1500,"runMs":20}
`
	const bad = `{"type":"result","index":0,"status":"refused","error":"no room","stdout":"","stderr":"","waitMs":10,"createMs":0,"runMs":0}
`
	const summary = `{"type":"summary","count":2,"ok":%d,"failed":0,"refused":%d,"timeout":0,"tookMs":2500}
`
	envs := filepath.Join(t.TempDir(), "envs")
	if err := os.WriteFile(envs, []byte("{\"N\": \"1\"}\n\n{\"N\": \"2\", \"M\": \"\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TAKEN", "from here")
	for _, tc := range []struct {
		args   []string
		answer string
		code   int
		words  []string
		asked  string
	}{
		{[]string{"--template", "base", "--count", "2", "--", "echo hi; exit"}, good + fmt.Sprintf(summary, 2, 0), 0,
			[]string{"ITEM", "1      ok       0     10ms     1.5s     20ms     i1                    two [2J\n", "cube: 2 items in 2.5s: 2 ok, 0 failed"},
			`{"template":"base","cmd":"echo hi; exit","count":2}`},
		{[]string{"--template", "base", "--env-file", envs, "-e", "A=b=c", "-e", "TAKEN", "--metadata", "m=1", "--timeout", "90s", "--deadline", "1500ms", "--concurrency", "3", "--no-internet", "--", "python3", "-c", "print('hi')"},
			good + bad + fmt.Sprintf(summary, 1, 1), 1, []string{"0      refused  -     10ms     0s       0s       -                     no room\n", "1 refused"},
			`{"template":"base","cmd":"python3 -c 'print('\\''hi'\\'')'","envs":[{"N":"1"},{"N":"2","M":""}],"envVars":{"A":"b=c","TAKEN":"from here"},"metadata":{"m":"1"},"timeout":90,"deadline":2,"concurrency":3,"allow_internet_access":false}`},
		{[]string{"--json", "--template", "base", "--count", "2", "true"}, good + bad + fmt.Sprintf(summary, 1, 1), 1, []string{`"stdout":"one\ntwo\u001b[2J\n\n"`, `"status":"refused"`}, ""},
		{[]string{"--template", "base", "--count", "2", "true"}, good + `{"type":"error","code":503,"message":"the API is being stopped"}`, 1, []string{"cube: batch: the API: the API is being stopped\n"}, ""},
		{[]string{"--template", "base", "--count", "2", "true"}, good, 1, []string{"cube: batch: what the API tells has broken off"}, ""},
		{[]string{"--count", "2", "true"}, "", 1, []string{"--template says"}, ""},
		{[]string{"--template", "base", "--count", "2"}, "", 1, []string{"it takes a command"}, ""},
		{[]string{"--template", "base", "true"}, "", 1, []string{"--count or --env-file"}, ""},
		{[]string{"--template", "base", "--count", "2", "--timeout", "0s", "true"}, "", 1, []string{"--timeout 0s must be a second at least"}, ""},
		{[]string{"--template", "base", "--count", "2", "-e", "=x", "true"}, "", 1, []string{`--env "=x" is not KEY=VALUE`}, ""},
		{[]string{"--template", "base", "--count", "2", "-e", "NOT_SET_HERE", "true"}, "", 1, []string{"isn't set here"}, ""},
		{[]string{"--template", "base", "--count", "2", "--metadata", "x", "true"}, "", 1, []string{`--metadata "x" is not`}, ""},
		{[]string{"--template", "base", "--env-file", "/nonexistent/x", "true"}, "", 1, []string{"--env-file: open /nonexistent/x"}, ""},
	} {
		answer = tc.answer
		asked = nil
		code, stdout, stderr := run(append([]string{"batch"}, tc.args...)...)
		for _, w := range tc.words {
			if !strings.Contains(stdout+stderr, w) {
				t.Errorf("%q: no %q in %q and %q", tc.args, w, stdout, stderr)
			}
		}
		if code != tc.code {
			t.Errorf("%q: %d", tc.args, code)
		}
		var want map[string]any
		if tc.asked != "" && (json.Unmarshal([]byte(tc.asked), &want) != nil || !reflect.DeepEqual(asked, want)) {
			t.Errorf("%q: asked %v", tc.args, asked)
		}
		if tc.answer == "" && asked != nil {
			t.Errorf("%q was sent", tc.args)
		}
	}
}

func TestReadEnvs(t *testing.T) {
	for text, want := range map[string]string{
		"":                      "nothing in it",
		"\n{\"A\":\"1\"}\n[]\n": "line 3 isn't",
		"{\"A\":1}":             "line 1 isn't",
		"null":                  "line 1 isn't",
		"{\"A\":\"1\"}\n" + strings.Repeat("x", 2<<20): "line 2 has 1048576 bytes or more",
	} {
		if _, err := readEnvs("-", strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v", text, err)
		}
	}
}

func TestShellLine(t *testing.T) {
	for want, args := range map[string][]string{
		"echo $HOME":           {"echo $HOME"},
		"echo '$HOME' a/b.c=1": {"echo", "$HOME", "a/b.c=1"},
		`echo '' 'it'\''s'`:    {"echo", "", "it's"},
	} {
		if got := shellLine(args); got != want {
			t.Errorf("%q: %s", args, got)
		}
	}
}
