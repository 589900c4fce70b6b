package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/bench"
)

// TestBenchFromOutside has a server on which creates work and nothing else.
func TestBenchFromOutside(t *testing.T) {
	stuck := false // nothing can be killed
	run := outside(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + " " + r.URL.Path {
		case "POST /sandboxes":
			w.WriteHeader(201)
			fmt.Fprint(w, `{"sandboxID":"i1","envdAccessToken":"x"}`)
		case "GET /v2/sandboxes":
			fmt.Fprint(w, "[]")
		case "DELETE /sandboxes/i1":
			if stuck {
				w.WriteHeader(503)
				return
			}
			w.WriteHeader(204)
		case "GET /health":
			w.WriteHeader(204)
		default:
			w.WriteHeader(501)
			fmt.Fprint(w, `{"code":501,"message":"not here"}`)
		}
	})
	code, stdout, stderr := run("bench", "-n", "3", "-c", "2", "--op", "create", "--op", "fork")
	for _, w := range []string{"template base, until envd has answered", "AT ONCE", "\ncreate ", "\nkill ", "\nfork ", "fork: 3 failed: 501: the API: not here\n", "cube: create: 3, 2 at once\n", "cube: bench: 3 have failed\n"} {
		if !strings.Contains(stdout+stderr, w) {
			t.Errorf("no %q in %q and %q", w, stdout, stderr)
		}
	}
	if code != 1 {
		t.Errorf("%d", code)
	}
	code, stdout, _ = run("bench", "-n", "3", "--op", "create", "--answered", "--json")
	var rep bench.Report
	if err := json.Unmarshal([]byte(stdout), &rep); err != nil || code != 0 || len(rep.Rows) != 2 || rep.Rows[0].Count != 3 || rep.Conditions.Until != "api" {
		t.Errorf("%d, %+v, %v", code, rep, err)
	}
	// What was measured is told also where something is left.
	stuck = true
	code, stdout, stderr = run("bench", "-n", "1", "--op", "create")
	if code != 1 || !strings.Contains(stdout, "\ncreate ") || !strings.Contains(stderr, "couldn't be removed, and are left: i1") {
		t.Errorf("%d, %q, %q", code, stdout, stderr)
	}
	for args, says := range map[string]string{"--op run": `--op "run" isn't one of create, exec`, "-n 0": "--count 0", "-c 100001": "--concurrency 100001", "x": "no arguments"} {
		if code, _, stderr := run(append([]string{"bench"}, strings.Fields(args)...)...); code != 1 || !strings.Contains(stderr, says) {
			t.Errorf("%s: %d %s", args, code, stderr)
		}
	}
}
