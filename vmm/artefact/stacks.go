package artefact

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// stacksDir has a symbolic link for each stack that takes its artefacts from a directory, to the stack's state directory.
const stacksDir = ".stacks"

// Register notes that the stack with that state directory takes its artefacts from the directory: what its snapshots need is
// to stay there. Idempotent.
func Register(artefacts, stateDir string) error {
	dir := filepath.Join(artefacts, stacksDir)
	err := os.MkdirAll(dir, 0o700)
	if errors.Is(err, unix.EROFS) { // where nobody can remove any
		return nil
	}
	if err != nil {
		return fmt.Errorf("register with the artefacts: %w", err)
	}
	sum := sha256.Sum256([]byte(stateDir))
	err = os.Symlink(stateDir, filepath.Join(dir, hex.EncodeToString(sum[:8])))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("register with the artefacts: %w", err)
	}
	return nil
}

// Stacks lists the state directories of those who have registered, but for those that are no more.
func Stacks(artefacts string) ([]string, error) {
	dir := filepath.Join(artefacts, stacksDir)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("who uses the artefacts: %w", err)
	}
	var all []string
	for _, e := range entries {
		link := filepath.Join(dir, e.Name())
		to, err := os.Readlink(link)
		if err == nil {
			if _, err = os.Stat(to); errors.Is(err, fs.ErrNotExist) {
				if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return nil, fmt.Errorf("who uses the artefacts: %w", err)
				}
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("who uses the artefacts: %w", err)
		}
		all = append(all, to)
	}
	return all, nil
}
