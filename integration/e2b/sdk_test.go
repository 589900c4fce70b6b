package e2b

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/sdks"
	"github.com/cubesandbox/cube/integration/testhost"
)

// parts are those of the suite in sdk, each a file.
var parts = []string{"create", "commands", "files", "network", "hosts", "errors", "git", "lifecycle"}

// TestSDK has published versions of E2B's SDK do what their users do, by either way to reach a stack: by headers, without TLS, or
// by the domain alone. Its sample has the newer version's calls by the one, and by the other what differs in the API's first
// generation; CUBE_TEST_LONG has both versions do all of it by both.
func TestSDK(t *testing.T) {
	node, scripts := sdks.Path(t, "sdk/node"), sdks.Scripts(t, "sdk")
	for _, c := range []struct {
		name, sdk string
		way       func(*testing.T, *exec.Cmd) *exec.Cmd
		sample    []string
	}{
		{"2.51 by domain", "e2b", byDomain, []string{"create", "commands", "files", "network", "hosts", "errors", "lifecycle"}},
		{"2.45 by headers", "e2b-2.45", byHeaders, []string{"basics", "lifecycle"}},
		{"2.51 by headers", "e2b", byHeaders, []string{"basics"}},
		{"2.45 by domain", "e2b-2.45", byDomain, nil},
	} {
		run := c.sample
		if long() {
			run = parts
		}
		if len(run) == 0 {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			cmd := c.way(t, s.Host.Command(node, append([]string{filepath.Join(scripts, "main.mjs"), c.sdk}, run...)...))
			cmd.Env = append(cmd.Env, "E2B_API_KEY="+key(t, "own"), "OTHER_KEY="+key(t, "other"), "SERVER="+testhost.Server.String())
			sdks.Run(t, cmd, 2+len(run))
		})
	}
}

// key makes a key of a team of the test's own.
func key(t *testing.T, of string) string {
	t.Helper()
	r := s.Cube("key", "create", "--team", "t"+strings.ToLower(strings.Map(letters, t.Name()))+of)
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
