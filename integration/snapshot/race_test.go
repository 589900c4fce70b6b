package snapshot

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestRaces: daemon and shims that tell of their data races have none to tell of, whatever is done at the same time.
func TestRaces(t *testing.T) {
	if os.Getenv("CUBE_TEST_LONG") == "" {
		t.Skip("it builds the binaries anew and takes minutes: CUBE_TEST_LONG=1 runs it")
	}
	root, err := stack.Repository()
	must(t, err)
	instrumented := filepath.Join(t.TempDir(), "bin")
	must(t, os.Mkdir(instrumented, 0o755))
	build := exec.Command("go", "build", "-race", "-o", instrumented+"/", "./cmd/cube", "./cmd/containerd-shim-cube-v2")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	others, err := filepath.Glob(filepath.Join(root, "bin", "*"))
	must(t, err)
	for _, path := range others {
		if err := os.Symlink(path, filepath.Join(instrumented, filepath.Base(path))); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
	told := filepath.Join(t.TempDir(), "race")
	t.Setenv("GORACE", "log_path="+told)
	if os.Getenv("CUBE_TIMEOUT_SCALE") == "" {
		t.Setenv("CUBE_TIMEOUT_SCALE", "3") // such binaries are slow
	}
	t.Cleanup(func() {
		reports, _ := filepath.Glob(told + ".*")
		for _, path := range reports {
			text, _ := os.ReadFile(path)
			t.Errorf("%s", text)
		}
	})
	ownStack(t, func(string) (*stack.Stack, error) { return stack.Start(filepath.Dir(instrumented)) })
	t.Run("parallel", TestParallel)
	t.Run("mixed", func(t *testing.T) { mixes(t, 15) })
	t.Run("clones", TestCloneEight)
	t.Run("abandoned", TestCloneAbandoned)
	t.Run("down", TestDownWhileCloning)
	t.Run("pause", TestPauseKilled)
}
