// Package owned makes directories and files that belong to a user. The daemon is root: what is made can be anywhere.
package owned

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// MakeDirs makes the directory and those above it. Only what it makes belongs to the user then. The error is syscall.ENOTDIR
// where something else has the name.
func MakeDirs(path string, u users.User) error {
	info, err := os.Stat(path)
	if err == nil {
		if !info.IsDir() {
			return &os.PathError{Op: "make directory", Path: path, Err: unix.ENOTDIR}
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if parent := filepath.Dir(path); parent != path {
		if err := MakeDirs(parent, u); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		if info, statErr := os.Stat(path); statErr == nil && info.IsDir() { // somebody else was faster
			return nil
		}
		return err
	}
	return give(path, u)
}

// give makes the directory the user's. Who may write above it can have put something else in its place: that isn't given away.
func give(path string, u users.User) error {
	d, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Chown(int(u.UID), int(u.GID)), d.Close())
}
