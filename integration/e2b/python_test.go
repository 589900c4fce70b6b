package e2b

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/integration/sdks"
	"github.com/cubesandbox/cube/integration/testhost"
)

// TestPython has the SDK for Python do what its users do, by its functions and by its coroutines.
func TestPython(t *testing.T) {
	modules := sdks.Path(t, "sdk-python")
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("SKIPPED:", err)
	}
	for _, c := range []struct {
		name string
		way  func(*testing.T, *exec.Cmd) *exec.Cmd
		long bool
	}{
		{"sync", byHeaders, false},
		{"async", byDomain, false},
		{"sync", byDomain, true},
		{"async", byHeaders, true},
	} {
		if c.long && os.Getenv("CUBE_TEST_LONG") == "" {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			cmd := c.way(t, s.Host.Command(python, filepath.Join("sdk", "suite.py"), c.name))
			cmd.Env = append(cmd.Env, "PYTHONPATH="+modules, "PYTHONDONTWRITEBYTECODE=1",
				"E2B_API_KEY="+key(t, "own"), "OTHER_KEY="+key(t, "other"), "SERVER="+testhost.Server.String())
			sdks.Run(t, cmd, 9)
		})
	}
}
