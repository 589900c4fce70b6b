package record

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// fullFile is in the directory of a machine that stands still because the store is full.
const fullFile = "store-full"

// MarkFull notes whether the machine in dir stands still because the store is full, for others to see. Who has removed dir
// doesn't need to know.
func MarkFull(dir string, full bool) error {
	path := filepath.Join(dir, fullFile)
	var err error
	if full {
		err = os.WriteFile(path, nil, 0o600)
	} else {
		err = os.Remove(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func isFull(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, fullFile))
	return err == nil
}
