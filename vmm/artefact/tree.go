package artefact

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// Node is one file of a Tree. Mode says what it is; of the other fields only the one that fits is used.
type Node struct {
	// Mode is the type (directory, symbolic link or regular file) and the permissions.
	Mode fs.FileMode
	// Source is the host file that a regular file's content is read from; Data is the content where Source is "".
	Source string
	Data   []byte
	// Link is a symbolic link's target.
	Link string
}

// Open reads a regular file's content.
func (n Node) Open() (io.ReadCloser, int64, error) {
	if n.Source == "" {
		return io.NopCloser(bytes.NewReader(n.Data)), int64(len(n.Data)), nil
	}
	f, err := os.Open(n.Source)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", n.Source)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

// Tree is a set of files to be written, by their paths relative to its root.
type Tree map[string]Node

// Add puts a node at path, with the directories that lead to it (mode 0755).
func (t Tree) Add(at string, n Node) {
	at = clean(at)
	for dir := path.Dir(at); dir != "."; dir = path.Dir(dir) {
		if _, ok := t[dir]; !ok {
			t[dir] = Node{Mode: fs.ModeDir | 0o755}
		}
	}
	t[at] = n
}

// Dir adds an empty directory.
func (t Tree) Dir(at string, perm fs.FileMode) { t.Add(at, Node{Mode: fs.ModeDir | perm}) }

// Paths lists all paths, parents before what is in them.
func (t Tree) Paths() []string { return slices.Sorted(maps.Keys(t)) }

// Write writes the tree into an existing, empty directory.
func (t Tree) Write(dir string) error {
	for _, at := range t.Paths() {
		if err := t[at].write(filepath.Join(dir, at)); err != nil {
			return fmt.Errorf("write %s: %w", at, err)
		}
	}
	return nil
}

func (n Node) write(to string) (err error) {
	switch n.Mode.Type() {
	case fs.ModeDir:
		if err := os.Mkdir(to, 0o700); err != nil {
			return err
		}
	case fs.ModeSymlink:
		return os.Symlink(n.Link, to)
	case 0:
		r, _, err := n.Open()
		if err != nil {
			return err
		}
		defer r.Close()
		w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		if _, err := io.Copy(w, r); err != nil {
			return errors.Join(err, w.Close())
		}
		if err := w.Close(); err != nil {
			return err
		}
	default:
		return fmt.Errorf("a %v can't be written to a directory", n.Mode)
	}
	// Chmod rather than the mode above: the umask must not matter.
	return os.Chmod(to, n.Mode.Perm())
}
