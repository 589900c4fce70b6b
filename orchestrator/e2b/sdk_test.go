package e2b

import (
	"bufio"
	"bytes"
	"cmp"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSDK has published versions of E2B's SDK, one of each generation, do what their users do with sandboxes.
func TestSDK(t *testing.T) {
	dir := filepath.Join(cmp.Or(os.Getenv("CUBE_CACHE"), "/var/cache/cube"), "sdk")
	node := filepath.Join(dir, "node")
	if _, err := os.Stat(node); err != nil {
		t.Skipf("SKIPPED: no SDK in %s; make setup installs it", dir)
	}
	for _, version := range []string{"e2b", "e2b-2.45"} {
		t.Run(version, func(t *testing.T) {
			w := newWhole(t)
			w.machines.short, w.machines.forks = true, 2
			srv := httptest.NewServer(w)
			defer srv.Close()
			c := exec.CommandContext(t.Context(), node, "testdata/sdk.mjs", filepath.Join(dir, "node_modules", version, "dist", "index.mjs"), srv.URL, w.blue)
			var stderr bytes.Buffer
			c.Stderr = &stderr
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			tests := 0
			for s := bufio.NewScanner(out); s.Scan(); tests++ {
				result, rest, _ := strings.Cut(s.Text(), "ok ")
				what, why, _ := strings.Cut(rest, "\t")
				t.Run(what, func(t *testing.T) {
					if result != "" {
						t.Error(why)
					}
				})
			}
			if err := c.Wait(); err != nil && !t.Failed() || tests < 12 {
				t.Errorf("after %d tests: %v\n%s", tests, err, stderr.String())
			}
		})
	}
}
