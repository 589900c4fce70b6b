package artefact

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// FileDigest is the SHA-256 of a file's content, in hex.
func FileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Digest names a directory by its content: the SHA-256, in hex, over path, mode and content of all that is in it, in
// the order of the paths. Times and owners don't count.
func Digest(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		var content string
		switch {
		case info.Mode().IsRegular():
			content, err = FileDigest(path)
		case info.Mode()&fs.ModeSymlink != 0:
			content, err = os.Readlink(path)
		case !info.IsDir():
			err = fmt.Errorf("%s is neither a file, a directory nor a symbolic link", path)
		}
		if err != nil {
			return err
		}
		// Quoted, so that no path can pass for a field or a line.
		_, err = fmt.Fprintf(h, "%q %v %q\n", rel, info.Mode(), content)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("digest of %s: %w", dir, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Verify checks that a published directory still is what its name says.
func Verify(dir string) error {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	digest, err := Digest(dir)
	if err != nil {
		return err
	}
	if want := filepath.Base(dir); digest != want {
		return fmt.Errorf("%s has been changed: its digest is %.12s…; make setup makes it again", dir, digest)
	}
	return nil
}

// syncTree has everything in dir on disk.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !(e.IsDir() || e.Type().IsRegular()) {
			return err
		}
		return syncFile(path)
	})
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// clean makes a slash-separated path relative to a root that it can't leave; "" is the root.
func clean(path string) string { return strings.TrimPrefix(filepath.Clean("/"+path), "/") }
