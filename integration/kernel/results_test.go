package kernel

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// results is what test binaries have said on a console.
type results struct {
	kernel                  string // its release
	passed, failed, skipped []string
	status                  string // the exit status; "" if the end is missing
	// trouble are lines of a kernel that has found a fault in itself.
	trouble []string
}

var (
	verdict = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(`)
	// panic and oops alike: Documentation/admin-guide/bug-hunting.rst.
	trouble = regexp.MustCompile(`^(\[ *[0-9.]+\] )?(BUG:|WARNING:|Oops|general protection fault|Kernel panic|rcu: INFO:|INFO: task)`)
)

func read(console string) (r results) {
	for line := range strings.Lines(console) {
		line = strings.TrimSuffix(line, "\n")
		if m := verdict.FindStringSubmatch(line); m != nil {
			to := map[string]*[]string{"PASS": &r.passed, "FAIL": &r.failed, "SKIP": &r.skipped}[m[1]]
			*to = append(*to, m[2])
		} else if v, ok := strings.CutPrefix(line, "kernel "); ok && r.kernel == "" {
			r.kernel = v
		} else if v, ok := strings.CutPrefix(line, "exit status "); ok {
			r.status = v
		} else if trouble.MatchString(line) {
			r.trouble = append(r.trouble, line)
		}
	}
	return r
}

// faults lists what is wrong with results of which some tests, and no others, may be skipped.
func (r results) faults(least int, maySkip func(string) bool) (faults []string) {
	if r.status != "0" {
		faults = append(faults, fmt.Sprintf("the guest's exit status is %q", r.status))
	}
	for _, name := range r.failed {
		faults = append(faults, name+" has failed")
	}
	for _, name := range r.skipped {
		if !maySkip(name) {
			faults = append(faults, name+" was skipped")
		}
	}
	if len(r.passed) < least {
		faults = append(faults, fmt.Sprintf("%d tests have passed, which should be %d at least", len(r.passed), least))
	}
	return append(faults, r.trouble...)
}

func TestResults(t *testing.T) {
	const good = "kernel 6.1.0\n=== RUN   TestA\n    a_test.go:1: kernel 7\n--- PASS: TestA (0.00s)\n    --- PASS: TestA/b (0.00s)\n    --- SKIP: TestA/TCX (0.00s)\nPASS\nexit status 0\n[  218.718404] reboot: Restarting system\n"
	for _, tc := range []struct {
		name, console string
		least         int
		want          []string
	}{
		{"good", good, 2, nil},
		{"too few", good, 3, []string{"2 tests have passed, which should be 3 at least"}},
		{"a failure", "--- FAIL: TestC (1.00s)\nexit status 1\n", 0, []string{`the guest's exit status is "1"`, "TestC has failed"}},
		{"a skip", "--- SKIP: TestC (1.00s)\nexit status 0\n", 0, []string{"TestC was skipped"}},
		{"cut off", "--- PASS: TestC (1.00s)\n", 0, []string{`the guest's exit status is ""`}},
		{"a fault of the kernel's", good + "[    2.0] BUG: unable to handle page fault\n", 2, []string{"[    2.0] BUG: unable to handle page fault"}},
		{"nothing", "", 1, []string{`the guest's exit status is ""`, "0 tests have passed, which should be 1 at least"}},
	} {
		r := read(tc.console)
		if got := r.faults(tc.least, needsTCX); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
		if strings.HasPrefix(tc.console, "kernel") && r.kernel != "6.1.0" {
			t.Errorf("%s: kernel %q", tc.name, r.kernel)
		}
	}
}
