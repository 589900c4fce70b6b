// Package unpack puts the files of a template's COPY where they are to be, out of the archive that a client has made of them. The
// archive is believed in nothing: what it has goes below one directory, and no link of it leads anything out of there.
package unpack

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/owned"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// maxEntries bounds an archive.
const maxEntries = 1 << 20

// Request says what is to be where.
type Request struct {
	// From is a path or a pattern below the directory that the archive was made in. Of a directory what is in it is copied.
	From string
	// To is absolute. It is a directory if it ends with a slash or is one, and if From is a pattern.
	To string
	// Owner is whose all of it becomes.
	Owner users.User
	// Mode is what it gets, with what a directory needs to be gone through; nil leaves the archive's.
	Mode *fs.FileMode
}

// Unpack reads a tar, compressed by gzip or not. The error is errdefs.ErrInvalidArgument where the archive, or the request, is wrong.
func Unpack(in io.Reader, r Request) error {
	plain, err := decompress(in)
	if err != nil {
		return err
	}
	pattern, err := newPattern(r.From)
	if err != nil {
		return err
	}
	u := &unpacking{Request: r, pattern: pattern, placed: map[string]string{}}
	defer u.close()
	archive := tar.NewReader(plain)
	for n := 0; ; n++ {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return invalid("the archive is damaged: %v", err)
		}
		if n == maxEntries {
			return invalid("the archive has more than %d entries", maxEntries)
		}
		if err := u.entry(h, archive); err != nil {
			return err
		}
	}
	if u.root == nil {
		return invalid("%q is not in what was uploaded", r.From)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

func decompress(in io.Reader) (io.Reader, error) {
	b := bufio.NewReaderSize(in, 64<<10)
	begin, err := b.Peek(2)
	if err != nil {
		return nil, invalid("the archive is empty: %v", err)
	}
	if !bytes.Equal(begin, []byte{0x1f, 0x8b}) {
		return b, nil
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, invalid("the archive is damaged: %v", err)
	}
	return z, nil
}

// unpacking is one under way.
type unpacking struct {
	Request
	pattern *pattern
	// root is the directory that all goes below, once there is anything. name is what the one file is called there, "" for what is a
	// directory's.
	root *os.Root
	name string
	// placed has where entries went, for links to them.
	placed map[string]string
}

func (u *unpacking) close() {
	if u.root != nil {
		u.root.Close()
	}
}

// entry takes one of the archive.
func (u *unpacking) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name := path.Clean(h.Name)
	if h.Name == "" || !filepath.IsLocal(name) || strings.ContainsRune(name, 0) {
		return invalid("the archive has %.200q, which is nowhere below its directory", h.Name)
	}
	top, ok := u.pattern.top(name)
	if !ok {
		return nil
	}
	isDir := h.Typeflag == tar.TypeDir
	if err := u.begin(isDir || top != name); err != nil {
		return err
	}
	var to string
	switch {
	case top == name && isDir:
		return nil // what is in it comes
	case top == name && u.name != "":
		to = u.name
	case top == name:
		to = path.Base(name)
	case top == ".":
		to = name
	default:
		to = strings.TrimPrefix(name, top+"/")
	}
	if err := u.place(h, to, content); err != nil {
		return fmt.Errorf("%s: %w", path.Join(u.root.Name(), to), err)
	}
	u.placed[name] = to
	return nil
}

// begin decides by the first thing that is copied where all goes.
func (u *unpacking) begin(isDir bool) error {
	if u.root != nil {
		return nil
	}
	dir := u.To
	if info, err := os.Stat(u.To); !isDir && !u.pattern.many && !strings.HasSuffix(u.To, "/") && (err != nil || !info.IsDir()) {
		dir, u.name = filepath.Split(u.To)
	}
	if err := owned.MakeDirs(filepath.Clean(dir), u.Owner); err != nil {
		return err
	}
	var err error
	u.root, err = os.OpenRoot(dir)
	return err
}

// place makes what the entry is.
func (u *unpacking) place(h *tar.Header, to string, content io.Reader) error {
	if err := u.makeDirs(path.Dir(to)); err != nil {
		return err
	}
	mode := h.FileInfo().Mode()
	switch h.Typeflag {
	case tar.TypeDir:
		return u.makeDir(to, mode)
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.file(h, to, mode, content)
	case tar.TypeSymlink:
		if err := u.makeWay(to); err != nil {
			return err
		}
		if err := u.root.Symlink(h.Linkname, to); err != nil {
			return err
		}
		return u.root.Lchown(to, int(u.Owner.UID), int(u.Owner.GID))
	case tar.TypeLink:
		first, ok := u.placed[path.Clean(h.Linkname)]
		if !ok {
			return invalid("it is a link to %.200q, which isn't copied", h.Linkname)
		}
		if err := u.makeWay(to); err != nil {
			return err
		}
		return u.root.Link(first, to)
	}
	return invalid("it is neither a file nor a directory nor a link")
}

// makeWay removes what is there, if it is no directory.
func (u *unpacking) makeWay(to string) error {
	info, err := u.root.Lstat(to)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return invalid("there is a directory of that name")
	}
	return u.root.Remove(to)
}

func (u *unpacking) file(h *tar.Header, to string, mode fs.FileMode, content io.Reader) (err error) {
	if err := u.makeWay(to); err != nil {
		return err
	}
	f, err := u.root.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.Copy(f, content); err != nil {
		return err
	}
	if err := f.Chown(int(u.Owner.UID), int(u.Owner.GID)); err != nil {
		return err
	}
	if err := f.Chmod(u.mode(mode)); err != nil { // after the owner, which takes set-user-id away
		return err
	}
	return u.root.Chtimes(to, h.ModTime, h.ModTime)
}

// makeDirs makes directories that the archive doesn't have.
func (u *unpacking) makeDirs(dir string) error {
	if dir == "." {
		return nil
	}
	if info, err := u.root.Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	if err := u.makeDirs(path.Dir(dir)); err != nil {
		return err
	}
	return u.makeDir(dir, fs.ModeDir|0o755)
}

// makeDir makes a directory. One that is there is left as it is.
func (u *unpacking) makeDir(dir string, mode fs.FileMode) error {
	if info, err := u.root.Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	if err := u.root.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := u.root.Lchown(dir, int(u.Owner.UID), int(u.Owner.GID)); err != nil {
		return err
	}
	return u.root.Chmod(dir, u.mode(mode))
}

// permissions are the bits of a mode that are kept.
const permissions = fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky

func (u *unpacking) mode(archive fs.FileMode) fs.FileMode {
	if u.Mode == nil {
		return archive & permissions
	}
	m := *u.Mode
	if archive.IsDir() {
		m |= m & 0o444 >> 2 // who may read it may go through it
	}
	return m
}
