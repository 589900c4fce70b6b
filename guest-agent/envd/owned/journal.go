package owned

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
)

// Journal remembers which files are not whole yet, so that one who comes after a daemon that was killed can remove them.
type Journal struct {
	// Dir has a file for each, which names it. Empty: nothing is remembered.
	Dir string
}

// note remembers a temporary file, which has that id in its name, until forget is called. A file is written whether or not it can be
// remembered: nothing is left of it unless the daemon is killed.
func (j Journal) note(id, path string) (forget func()) {
	if j.Dir == "" {
		return func() {}
	}
	record := filepath.Join(j.Dir, id)
	if err := os.WriteFile(record, []byte(path), 0o600); err != nil {
		slog.Warn("a file that is being written would be left if this daemon were killed", "file", path, "error", err)
	}
	return func() { _ = os.Remove(record) }
}

// Open makes the journal's directory. Clean, which may take as long as the file systems that they are in like, removes the files
// that another daemon has left. It may be called while others are being written.
func (j Journal) Open() (clean func(), err error) {
	err = os.MkdirAll(filepath.Dir(j.Dir), 0o755) // it is others', too
	if err == nil {
		err = os.MkdirAll(j.Dir, 0o700)
	}
	var left []fs.DirEntry
	if err == nil {
		left, err = os.ReadDir(j.Dir)
	}
	if err != nil {
		return nil, fmt.Errorf("the journal of files: %w", err)
	}
	return func() {
		for _, e := range left {
			record := filepath.Join(j.Dir, e.Name())
			path, err := os.ReadFile(record)
			if err == nil {
				err = removeTemporary(string(path), e.Name())
			}
			if err != nil {
				slog.Warn("a file that isn't whole can't be removed", "file", string(path), "error", err)
			}
			_ = os.Remove(record) // another attempt would be no better
		}
	}, nil
}

// removeTemporary removes what has the name of a temporary file with that id: nothing else, whatever a record says.
func removeTemporary(path, id string) error {
	if filepath.Base(path) != temporary+id {
		return nil // it was being written down
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
