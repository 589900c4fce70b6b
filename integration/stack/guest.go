package stack

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// PackGuest makes the guest image with another agent, in artefacts, and has it be the one in use there.
func PackGuest(artefacts, agent string) error {
	root, err := Repository()
	if err != nil {
		return err
	}
	parts := filepath.Join(Cache(), "guest")
	release, err := os.ReadFile(filepath.Join(parts, "release"))
	if err != nil {
		return err
	}
	bin := filepath.Join(root, "bin")
	out, err := exec.Command(filepath.Join(bin, "cube-artefact"), "guest", "--out", filepath.Join(artefacts, "guest"),
		"--packages", filepath.Join(parts, "packages"), "--kernel", filepath.Join(parts, "kernel"), "--crun", filepath.Join(parts, "crun"),
		"--release", strings.TrimSpace(string(release)), "--agent", agent, "--envd", filepath.Join(bin, "cube-envd")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("pack a guest image: %w: %s", err, out)
	}
	return nil
}
