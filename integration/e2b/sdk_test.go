package e2b

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestSDK has published versions of E2B's SDK do what their users do.
func TestSDK(t *testing.T) {
	sdk := filepath.Join(stack.Cache(), "sdk")
	if _, err := os.Stat(filepath.Join(sdk, "node")); err != nil {
		t.Skipf("SKIPPED: no SDK in %s; make setup installs it", sdk)
	}
	suite, err := os.ReadFile("sdk/suite.mjs")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"e2b", "e2b-2.45"} {
		t.Run(name, func(t *testing.T) {
			// The modules are found from where the script is.
			script := filepath.Join(sdk, fmt.Sprintf("suite-%d.mjs", os.Getpid()))
			if err := os.WriteFile(script, suite, 0o644); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(script)
			c := s.Host.Command(filepath.Join(sdk, "node"), script, name)
			c.Env = append(os.Environ(), "E2B_API_KEY="+key(t),
				"E2B_API_URL=http://"+s.Config.API.Listen.String(), "E2B_SANDBOX_URL=http://"+s.Config.Proxy.Listen.String())
			c.Stderr = os.Stderr
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			tests := 0
			for lines := bufio.NewScanner(out); lines.Scan(); {
				result, rest, _ := strings.Cut(lines.Text(), "ok ")
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
			if tests < 5 {
				t.Errorf("only %d tests were run", tests)
			}
		})
	}
}

// key makes a key of a team of the test's own.
func key(t *testing.T) string {
	t.Helper()
	r := s.Cube("key", "create", "--team", "t"+strings.ToLower(strings.Map(letters, t.Name())))
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	return strings.TrimSpace(r.Stdout)
}

func letters(r rune) rune {
	if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
		return r
	}
	return -1
}
