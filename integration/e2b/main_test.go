// Package e2b runs published E2B SDKs and command lines against a whole stack: real machines, its API and its proxy.
package e2b

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// s is the stack that all tests share; it has the template base.
var s *stack.Stack

func TestMain(m *testing.M) {
	stack.Main(m, &s, prepare)
}

// prepare makes the template that E2B's clients ask for unless told otherwise.
func prepare(st *stack.Stack) error {
	archive := filepath.Join(stack.Cache(), "images", "base-bookworm.tar")
	if _, err := os.Stat(archive); err != nil {
		return fmt.Errorf("no base image (make setup makes it): %w", err)
	}
	for _, args := range [][]string{
		{"image", "import", archive},
		{"template", "build", "--public", "--memory", "512", "base", "cube.local/base:bookworm"},
	} {
		if r := st.Cube(args...); r.Err != nil {
			return errors.Join(fmt.Errorf("cube %s: %w", strings.Join(args, " "), r.Err), fmt.Errorf("%s", r.Stderr))
		}
	}
	return nil
}
