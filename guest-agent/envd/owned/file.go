package owned

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/metadata"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// temporary begins the names of files that are not whole yet.
const temporary = ".cube-envd-"

// IsTemporary says whether a path is that of a file that isn't whole yet.
func IsTemporary(path string) bool { return strings.HasPrefix(filepath.Base(path), temporary) }

// File is being written. Under its name there is what was before until Commit, and all of it then. Other things than
// files (devices, pipes), mount points and files in directories that take no others (/proc) are written in place.
type File struct {
	*os.File
	path   string
	temp   string // empty: in place
	forget func() // that temp is there
}

// Create begins a file that belongs to the user, and makes the directories above it. It replaces one that is there, and keeps
// its mode; a link is followed. Commit or Abort must be called.
func (j Journal) Create(path string, u users.User) (_ *File, err error) {
	if path, err = follow(path); err != nil {
		return nil, err
	}
	mode := fs.FileMode(0o644)
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := MakeDirs(filepath.Dir(path), u); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, errdefs.ErrInvalidArgument.WithMessage(path + " is a directory")
	case !info.Mode().IsRegular() || mounted(path):
		return inPlace(path)
	default:
		mode = info.Mode().Perm()
	}
	id := rand.Text()
	temp := filepath.Join(filepath.Dir(path), temporary+id)
	forget := j.note(id, temp)
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		forget()
	}
	if err != nil && info != nil && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return inPlace(path)
	}
	if err != nil {
		return nil, err
	}
	w := &File{File: f, path: path, temp: temp, forget: forget}
	if err := errors.Join(f.Chown(int(u.UID), int(u.GID)), f.Chmod(mode)); err != nil {
		w.Abort()
		return nil, err
	}
	return w, nil
}

func inPlace(path string) (*File, error) {
	// A pipe that nobody reads doesn't hold this up. Links have been followed: one that is there by then is somebody's trap.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return &File{File: f, path: path}, nil
}

// maxLinks is the kernel's limit of links to follow.
const maxLinks = 40

// follow follows a link to where the file is or will be. Links of the directories above stay in the path.
func follow(path string) (string, error) {
	for range maxLinks {
		info, err := os.Lstat(path)
		if err != nil || info.Mode()&fs.ModeSymlink == 0 {
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return "", err
			}
			return path, nil
		}
		target, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(target) {
			// Not joined, which would take ".." before the links.
			dir, err := filepath.EvalSymlinks(filepath.Dir(path))
			if err != nil {
				return "", err
			}
			target = filepath.Join(dir, target)
		}
		path = target
	}
	return "", &os.PathError{Op: "follow", Path: path, Err: unix.ELOOP}
}

// mounted says whether the file is a mount point, which can't be replaced.
func mounted(path string) bool {
	var x unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, 0, &x)
	return err == nil && x.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// Commit gives the file its metadata and its name.
func (f *File) Commit(meta map[string]string) (err error) {
	if f.temp == "" && !f.regular() {
		return f.Close()
	}
	defer func() {
		if err != nil {
			f.Abort()
		}
	}()
	if err := metadata.Set(f.File, meta); err != nil {
		return err
	}
	if f.temp == "" {
		return f.Close()
	}
	if err := os.Rename(f.temp, f.path); err != nil {
		return err
	}
	f.temp = ""
	f.forget()
	// Who watches the directory has heard of a name. That it has content as well is heard of by a change of the file, to
	// the size that it has.
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := f.Truncate(info.Size()); err != nil {
		return err
	}
	return f.Close()
}

func (f *File) regular() bool {
	info, err := f.Stat()
	return err == nil && info.Mode().IsRegular()
}

// Abort leaves what was there before. After Commit it does nothing.
func (f *File) Abort() {
	_ = f.Close()
	if f.temp != "" {
		_ = os.Remove(f.temp)
		f.temp = ""
		f.forget()
	}
}

// Path is where the file is, with links followed.
func (f *File) Path() string { return f.path }

// Full explains an error of a full disk.
func Full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("not enough disk space: %w", err)
	}
	return err
}
