package client

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// TestBatch: results are told as they come, and the batch's end is what the API says.
func TestBatch(t *testing.T) {
	const results = "{\"type\":\"progress\",\"done\":0}\n{\"type\":\"result\",\"index\":1,\"status\":\"failed\",\"exitCode\":3,\"stdout\":\"a\\n\",\"stdoutOmitted\":7}\n" +
		"{\"type\":\"else\"}\n{\"type\":\"result\",\"index\":0,\"status\":\"refused\"}\n"
	enough := errors.New("enough")
	for _, tc := range []struct {
		status int
		answer string
		each   error
		is     func(error) bool
		told   int
	}{
		{200, results + "{\"type\":\"summary\",\"count\":2,\"failed\":1,\"refused\":1,\"tookMs\":5}\n", nil, func(err error) bool { return err == nil }, 2},
		{200, results + "{\"type\":\"error\",\"code\":401,\"message\":\"the key is revoked\"}\n", nil, errdefs.IsUnauthorized, 2},
		{200, results, nil, errdefs.IsUnavailable, 2},
		{200, results + "{", nil, func(err error) bool { return err != nil }, 2},
		{200, results, enough, func(err error) bool { return errors.Is(err, enough) }, 1},
		{400, `{"code":400,"message":"count: it is required"}`, nil, errdefs.IsInvalidArgument, 0},
	} {
		c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(tc.status)
			fmt.Fprint(w, tc.answer)
		}), nil)
		var told []BatchResult
		sum, err := c.Batch(t.Context(), BatchRequest{Template: "base", Command: "true", Count: 2}, func(r BatchResult) error {
			told = append(told, r)
			return tc.each
		})
		if !tc.is(err) || len(told) != tc.told {
			t.Errorf("%.80s: %+v, %v", tc.answer, told, err)
		}
		if err == nil && sum != (BatchSummary{Count: 2, Failed: 1, Refused: 1, TookMS: 5}) {
			t.Errorf("%+v", sum)
		}
		if tc.told > 0 && (told[0].Index != 1 || *told[0].ExitCode != 3 || told[0].Stdout != "a\n" || told[0].StdoutOmitted != 7) {
			t.Errorf("%+v", told[0])
		}
	}
}

// TestMade: what the API makes is the way into it, and nothing that is no id gets into a URL.
func TestMade(t *testing.T) {
	answer, status := "", 201
	var asked string
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.Method + " " + r.URL.EscapedPath()
		w.WriteHeader(status)
		fmt.Fprint(w, answer)
	}), nil)
	answer = `{"sandboxID":"i1","envdAccessToken":"x","domain":null}`
	if g, err := c.Create(t.Context(), Create{TemplateID: "base"}); err != nil || g.ID != "i1" || g.token != "x" {
		t.Errorf("%+v, %v", g, err)
	}
	for _, answer = range []string{`{"sandboxID":"../x"}`, `{}`, `[]`, ``} {
		if g, err := c.Create(t.Context(), Create{}); err == nil {
			t.Errorf("%q: %+v", answer, g)
		}
	}
	answer = `[{"sandbox":{"sandboxID":"i2"}}]`
	if g, err := c.Fork(t.Context(), "i1", time.Minute); err != nil || g.ID != "i2" {
		t.Errorf("%+v, %v", g, err)
	}
	answer = `[{"error":{"code":503,"message":"no room"}}]`
	if _, err := c.Fork(t.Context(), "i1", time.Minute); !errdefs.IsUnavailable(err) || Status(err) != 503 || !strings.Contains(err.Error(), "no room") {
		t.Errorf("%v", err)
	}
	for _, answer = range []string{`[]`, `[{}]`, `[{"sandbox":{"sandboxID":"/"}}]`} {
		if g, err := c.Fork(t.Context(), "i1", time.Minute); err == nil {
			t.Errorf("%q: %+v", answer, g)
		}
	}
	status, answer = 204, ""
	if err := c.DeleteTemplate(t.Context(), "blue/a b:default"); err != nil || asked != "DELETE /templates/blue%2Fa%20b:default" {
		t.Errorf("%s, %v", asked, err)
	}
}
