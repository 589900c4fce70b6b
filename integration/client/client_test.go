// Package client runs containerd's own client suite (integration/client of its module) with io.cube.v2 as the runtime and
// cube as the snapshotter.
package client

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
)

// The directories of a containerd that the suite starts, which it doesn't let one choose (containerd,
// integration/client/client_unix.go).
const (
	daemonRoot  = "/var/lib/containerd-test"
	daemonState = "/run/containerd-test"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }

// suite is the built suite with what it needs.
type suite struct {
	binary string
	env    []string
}

// TestSuite runs the tests of the table: the sample, or with CUBE_TEST_LONG all of them.
func TestSuite(t *testing.T) {
	su := build(t)
	t.Run("the table has every test", func(t *testing.T) { complete(t, su) })
	for _, r := range table {
		t.Run(r.name, func(t *testing.T) {
			switch {
			case r.kind == skip:
				t.Skip(r.reason)
			case r.kind != sample && os.Getenv("CUBE_TEST_LONG") == "":
				t.Skip("not in the sample; CUBE_TEST_LONG=1 runs it")
			}
			su.run(t, r)
		})
	}
}

// build has the suite built, unless it is there, and makes its images.
func build(t *testing.T) *suite {
	t.Helper()
	root, err := stack.Repository()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), s.Config.Timeout(10*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(root, "deploy", "setup", "tools.sh"), "client")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the suite: %v: %s", err, out)
	}
	stand, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(s.Config.RunDir, "client")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return &suite{
		binary: filepath.Join(stack.Cache(), "bin", "containerd-client.test"),
		env: slices.Concat(s.Command("cube").Env, serve(t, suiteImages(t)), []string{
			"TEST_RUNTIME=io.cube.v2",
			"CLIENT_SUITE_BIN=" + s.Config.BinDir,
			"CLIENT_SUITE_DIR=" + dir,
			"PATH=" + strings.Join([]string{stand, s.Config.BinDir, os.Getenv("PATH")}, ":"),
		}),
	}
}

// complete compares the table with the suite.
func complete(t *testing.T, su *suite) {
	out, err := su.output(t, time.Minute, "-test.short", "-test.list", ".")
	if err != nil {
		t.Fatalf("list the suite's tests: %v: %s", err, out)
	}
	var have []string
	for _, line := range strings.Fields(out) {
		if strings.HasPrefix(line, "Test") {
			have = append(have, line)
		}
	}
	var listed []string
	for _, r := range table {
		name, _, _ := strings.Cut(r.name, "/")
		listed = append(listed, name)
		if !slices.Contains(have, name) {
			t.Errorf("the table has %s, the suite hasn't", name)
		}
		if (r.kind == skip) != (r.reason != "") {
			t.Errorf("%s: a reason is for a test that is skipped, and only for it", r.name)
		}
	}
	for _, name := range have {
		if !slices.Contains(listed, name) {
			t.Errorf("the suite has %s, the table hasn't", name)
		}
	}
}

// verdict is what -test.v prints of a test at the top level.
var verdict = regexp.MustCompile(`(?m)^--- (PASS|FAIL|SKIP): (\S+) `)

// run runs one test, which must pass and leave nothing.
func (su *suite) run(t *testing.T, r row) {
	args := []string{"-test.v", "-test.root", "-no-criu", "-no-shim-cgroup", "-test.run", "^" + r.name + "$"}
	for _, sub := range table {
		if test, name, ok := strings.Cut(sub.name, "/"); ok && test == r.name {
			args = append(args, "-test.skip", "^"+test+"$/^"+regexp.QuoteMeta(name)+"$")
		}
	}
	if r.kind == daemon {
		t.Cleanup(func() {
			if err := errors.Join(os.RemoveAll(daemonRoot), os.RemoveAll(daemonState)); err != nil {
				t.Error(err)
			}
		})
	} else {
		args = append(args, "-no-daemon", "-address", s.Config.ContainerdSocket())
	}
	within := 3 * time.Minute
	if r.kind == slow {
		within = time.Hour
	}
	out, err := su.output(t, within, args...)
	if m := verdict.FindStringSubmatch(out); err != nil || m == nil || m[1] != "PASS" {
		t.Errorf("%v\n%s", err, out)
		remove(t)
	}
	s.Eventually(t, 10*time.Second, "nothing left", func() bool { return len(s.VMLeaks()) == 0 })
}

// output runs the suite's binary. A containerd that it has started goes with it.
func (su *suite) output(t *testing.T, within time.Duration, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), s.Config.Timeout(within))
	defer cancel()
	cmd := exec.CommandContext(ctx, su.binary, args...)
	cmd.Env = su.env
	if slices.Contains(args, "-no-daemon") {
		cmd.Env = slices.Concat(su.env, []string{"TEST_SNAPSHOTTER=cube"})
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = s.Config.Timeout(10 * time.Second)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// remove removes what a test that has failed has left, so that the next ones don't fail of it.
func remove(t *testing.T) {
	for _, id := range strings.Fields(s.Ctr("-n", "testing", "task", "ls", "-q").Stdout) {
		t.Logf("left: task %s", id)
		s.Ctr("-n", "testing", "task", "rm", "-f", id)
	}
	for _, id := range strings.Fields(s.Ctr("-n", "testing", "container", "ls", "-q").Stdout) {
		s.Ctr("-n", "testing", "container", "rm", id)
	}
}
