// Package templates makes templates step by step, in real machines.
package templates

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

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
	imports(t, odd, oddLayer(t), "ODD=image")
	within(t, "TestRecipe")
}

// TestLarge has a template be made of an image with a GiB that can't be made smaller, with CUBE_TEST_LONG.
func TestLarge(t *testing.T) {
	if s == nil || !long {
		t.Skip("SKIPPED: it runs the other, with CUBE_TEST_LONG")
	}
	layer := filepath.Join(t.TempDir(), "layer.tar")
	sums, err := stack.WriteLayer(layer, "big", 8, 128<<20, 1)
	must(t, err)
	imports(t, large, layer)
	within(t, "TestLargeImage", "CUBE_TEST_SUM="+sums["/big/7"])
}

// imports has the stack have an image: the demo image with one layer more.
func imports(t *testing.T, name, layer string, env ...string) {
	t.Helper()
	archive := filepath.Join(t.TempDir(), "image.tar")
	began := time.Now()
	must(t, stack.Derive(stack.DemoArchive(), archive, name, layer, env...))
	derived := time.Now()
	if r := s.Cube("image", "import", archive); r.Err != nil {
		t.Fatal(r.Err)
	}
	t.Logf("%s: made in %.1f s, imported in %.1f s", name, derived.Sub(began).Seconds(), time.Since(derived).Seconds())
}

// within runs a test in the network of the stack.
func within(t *testing.T, test string, env ...string) {
	t.Helper()
	cmd := s.Host.Command(os.Args[0], "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(append(os.Environ(), inside+"=1", config.FileEnv+"="+filepath.Join(s.Dir, "config.toml")), env...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
}
