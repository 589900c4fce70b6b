package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

func TestCapacity(t *testing.T) {
	used := "1.25"
	const told = `{"cpu":{"total":4,"reserved":0.5,"used":%s,"free":2.75},"memory":{"total":8589934592,"reserved":1073741824,"used":2147483648,"free":6442450944},
		"disk":{"total":17179869184,"reserved":0,"used":0,"free":17179869184},"spare":{"cpu":0.03,"memory":100663296,"disk":0},"pressure":{"cpu":12.5,"memory":0,"io":1},"running":3,"paused":2,
		"team":{"teamID":"blue","used":{"running":1,"vcpus":2,"memory":536870912,"disk":1073741824},"limits":{"running":20}},
		"templates":[{"templateID":"t1","names":["blue/a\u001b[2J","blue/b"],"profile":"resident","cpuCount":2,"memoryMB":512,"reserved":{"cpu":2,"memory":603979776,"disk":1073741824},"room":7,"short":"host_cpu"}]}`
	var created int
	run := outside(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/capacity" && r.URL.Query().Get("template") == "none":
			w.WriteHeader(404)
			fmt.Fprint(w, `{"code":404,"message":"template 'none' not found"}`)
		case r.URL.Path == "/capacity":
			fmt.Fprintf(w, told, used)
		case r.Method == http.MethodPost:
			created++
			w.Header().Set("Retry-After", "10")
			w.WriteHeader(503)
			fmt.Fprint(w, `{"code":503,"message":"the host is full"}`)
		default:
			fmt.Fprint(w, "[]")
		}
	})
	for _, c := range []struct {
		args  string
		code  int
		words []string
	}{
		{"capacity", 0, []string{"CPUs     4.00    0.50       1.25   2.75\n", "memory   8GiB    1GiB       2GiB   6GiB\n", "3 sandboxes run, 2 are paused. 0.03 CPUs and 96MiB of memory", "CPU in 12 %, memory 0 %, I/O 1 %",
			"Team blue runs 1 of 20 sandboxes with 2 vCPUs and 512MiB of memory, and has 1GiB of disk.", "blue/a [2J, blue/b   resident   2       512MiB   2.00 CPUs, 576MiB, 1GiB   7      host_cpu\n",
			"\nhost_cpu: all CPUs are reserved then: admission.cpu_overcommit, for disposable ones\nROOM is by what is reserved"}},
		{"capacity --json", 0, []string{`"room": 7`}},
		{"capacity x", 1, []string{"no arguments"}},
		{"capacity --template none", 1, []string{"capacity: the API: template 'none' not found"}},
		{"capacity probe --template a", 1, []string{`"cmd"`}},
		{"capacity probe --template a --cmd true x", 1, []string{"no arguments"}},
		{"capacity probe --template a --cmd true --step 0", 1, []string{"capacity probe: a step is of one sandbox at least"}},
		{"capacity probe --template none --cmd true", 1, []string{"template 'none' not found"}},
		{"capacity probe --template a --cmd true", 0, []string{"7                admission (resident; short then: host_cpu)\n", "0 or more        this load, and the host's pressure\n", "It ended: the API: the host is full; try again in 10 s."}},
	} {
		code, stdout, stderr := run(strings.Fields(c.args)...)
		for _, w := range c.words {
			if !strings.Contains(stdout+stderr, w) {
				t.Errorf("cube %s: no %q in %q and %q", c.args, w, stdout, stderr)
			}
		}
		if code != c.code {
			t.Errorf("cube %s: %d", c.args, code)
		}
	}
	for of, want := range map[string]bool{"3.5": false, "3.6": true} {
		used = of
		if _, stdout, _ := run("capacity"); strings.Contains(stdout, "They disagree: 0.50 CPUs are reserved, but 3.60 of 4.00 are in use") != want {
			t.Errorf("with %s CPUs in use: %s", of, stdout)
		}
	}
	if created != 1 {
		t.Errorf("%d sandboxes were asked for", created)
	}
}
