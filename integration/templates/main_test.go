// Package templates makes templates step by step, in real machines.
package templates

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/config"
)

// s is the stack that all tests share.
var s *stack.Stack

// inside is set for a process of the test's that is in the network of the stack, where machines are reached.
const inside = "CUBE_TEST_INSIDE"

func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	if err := trust(); err != nil {
		fmt.Println("make the registries' certificate:", err)
		os.Exit(1)
	}
	stack.Main(m, &s)
}

// TestSteps runs the tests of steps in the network of the stack.
func TestSteps(t *testing.T) {
	if s == nil {
		t.Skip("SKIPPED: it runs the others")
	}
	archive := filepath.Join(t.TempDir(), "odd.tar")
	derive(t, stack.DemoArchive(), archive, odd, oddLayer(t))
	if r := s.Cube("image", "import", archive); r.Err != nil {
		t.Fatal(r.Err)
	}
	cmd := s.Host.Command(os.Args[0], "-test.run=^TestRecipe$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1", config.FileEnv+"="+filepath.Join(s.Dir, "config.toml"))
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
}
