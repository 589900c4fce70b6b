package envd

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestSDK has published versions of E2B's SDK call the daemon, as its users' programs do.
func TestSDK(t *testing.T) {
	sdk := filepath.Join(stack.Cache(), "sdk")
	if _, err := os.Stat(filepath.Join(sdk, "node")); err != nil {
		t.Skipf("SKIPPED: no SDK in %s; make setup installs it", sdk)
	}
	for _, name := range []string{"e2b", "e2b-2.45"} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "-user", "user")
			suite, err := os.ReadFile("sdk/suite.mjs")
			must(t, err)
			// The modules are found from where the script is.
			script := filepath.Join(sdk, "suite-"+filepath.Base(t.TempDir())+".mjs")
			must(t, os.WriteFile(script, suite, 0o644))
			defer os.Remove(script)
			c := b.command(false, filepath.Join(sdk, "node"), script, name)
			c.Env = append(os.Environ(), "E2B_DEBUG=true", "E2B_API_KEY=e2b_00")
			c.Stderr = b.log
			out, err := c.StdoutPipe()
			must(t, err)
			must(t, c.Start())
			tests := 0
			for s := bufio.NewScanner(out); s.Scan(); {
				result, rest, _ := strings.Cut(s.Text(), "ok ")
				what, how, _ := strings.Cut(rest, "\t")
				tests++
				t.Run(what, func(t *testing.T) {
					t.Log(how)
					if result != "" {
						t.Fail()
					}
				})
			}
			if err := c.Wait(); err != nil && !t.Failed() {
				t.Errorf("the suite has ended early: %v", err)
			}
			if tests < 15 {
				t.Errorf("only %d tests were run", tests)
			}
		})
	}
}
