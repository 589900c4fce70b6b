// Package sdks runs scripts that use E2B's published SDKs, which set-up has installed, as tests.
package sdks

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// Names are the JavaScript SDKs, as scripts import them: the newest, and the last that uses the first generation of the API.
var Names = []string{"e2b", "e2b-2.45"}

// Path is a file that set-up has made, below its cache. Without it the test is skipped.
func Path(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(stack.Cache(), name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("SKIPPED: there is no %s; make setup installs it", path)
	}
	return path
}

// Scripts is a copy of a directory of scripts for Node, from where they find the SDKs.
func Scripts(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(Path(t, "sdk/node_modules"), filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Run runs a script to its end. Each line that it writes is a test: "ok NAME" or "not ok NAME", and after a tab how long it took,
// or why. There have to be as many as least.
func Run(t *testing.T, c *exec.Cmd, least int) {
	t.Helper()
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	tests := 0
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		result, rest, _ := strings.Cut(lines.Text(), "ok ")
		name, how, _ := strings.Cut(rest, "\t")
		tests++
		t.Run(name, func(t *testing.T) {
			t.Log(how)
			if result != "" {
				t.Fail()
			}
		})
	}
	if err := c.Wait(); err != nil && !t.Failed() {
		t.Errorf("the script has ended early: %v", err)
	}
	if lines.Err() != nil || tests < least {
		t.Errorf("only %d tests were run: %v", tests, lines.Err())
	}
}
