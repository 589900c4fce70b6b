package stack

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// BuildBase gives the stack the public template base, which E2B's clients ask for unless told otherwise.
func (s *Stack) BuildBase() error {
	archive := filepath.Join(Cache(), "images", "base-bookworm.tar")
	if _, err := os.Stat(archive); err != nil {
		return fmt.Errorf("no base image (make setup makes it): %w", err)
	}
	for _, args := range [][]string{
		{"image", "import", archive},
		{"template", "build", "--public", "--memory", "512", "base", "cube.local/base:bookworm"},
	} {
		if r := s.Cube(args...); r.Err != nil {
			return fmt.Errorf("cube %s: %w", strings.Join(args, " "), r.Err)
		}
	}
	return nil
}
