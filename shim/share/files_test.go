package share_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/share/internal/client"
	"github.com/cubesandbox/cube/shim/spec"
)

// serve shares a directory of another user, which nobody else may enter, and attaches as a third one.
func serve(t *testing.T) (dir string, c *client.Client, root uint32) {
	t.Helper()
	dir = t.TempDir()
	s := start(t, spec.Share{Source: dir})
	if err := errors.Join(os.Chown(dir, 4321, 4321), os.Chmod(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	c, root = connect(t, s.Conns()[0], 1000)
	return dir, c, root
}

func lstat(t *testing.T, dir, name string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
		t.Fatal(err)
	}
	return st
}

func TestOpenFlags(t *testing.T) {
	dir, c, root := serve(t)
	f := must(c.Create(root, "f", unix.O_WRONLY|unix.O_EXCL, 0o400, 100))(t)
	must(c.Write(f, 0, []byte("0123456789")))(t)
	_, err := c.Read(f, 0, 1)
	wants(t, "read what is open for writing", err, unix.EBADF)
	_, err = c.Create(root, "f", unix.O_RDWR|unix.O_EXCL, 0o600, 100)
	wants(t, "O_EXCL", err, unix.EEXIST)

	f = must(c.Create(root, "f", unix.O_RDWR|unix.O_CREAT, 0o600, 100))(t)
	if b := must(c.Read(f, 2, 4))(t); string(b) != "2345" {
		t.Errorf("without O_EXCL: %q", b)
	}
	f = must(c.Open(root, unix.O_WRONLY|unix.O_APPEND, "f"))(t)
	must(c.Write(f, 0, []byte("ab")))(t)
	if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != "0123456789ab" {
		t.Errorf("O_APPEND: %q, %v", b, err)
	}
	for _, flags := range []int{unix.O_WRONLY | unix.O_TRUNC, unix.O_RDWR | unix.O_SYNC, unix.O_RDWR | unix.O_DSYNC} {
		f = must(c.Open(root, flags, "f"))(t)
		must(c.Do(client.Fsync, f, uint32(0)))(t)
		must(c.Do(client.Fsync, f, uint32(1)))(t)
	}
	if st := lstat(t, dir, "f"); st.Size != 0 {
		t.Errorf("O_TRUNC: %d bytes", st.Size)
	}
	_, err = c.Open(root, unix.O_WRONLY)
	wants(t, "write to a directory", err, unix.EISDIR)
	_, err = c.Open(root, unix.O_DIRECTORY, "f")
	wants(t, "O_DIRECTORY", err, unix.ENOTDIR)
	_, err = c.Open(root, 3, "f")
	wants(t, "access mode 3", err, unix.EINVAL)
	_, err = c.Do(client.Lopen, f, uint32(0))
	wants(t, "open twice", err, unix.EBADF)
	_, err = c.Do(client.Write, f, uint64(1)<<63, uint32(0))
	wants(t, "negative offset", err, unix.EINVAL)
	_, err = c.Do(client.Read, root, uint64(0), uint32(1))
	wants(t, "read what isn't open", err, unix.EBADF)
	_, err = c.Do(client.Fsync, uint32(9999), uint32(0))
	wants(t, "no such fid", err, unix.EBADF)
}

// Entries of all kinds that may be made, and their owners.
func TestEntries(t *testing.T) {
	dir, c, root := serve(t)
	must(c.Do(client.Mkdir, root, "d", uint32(0o1777), uint32(100)))(t)
	must(c.Do(client.Symlink, root, "s", "/etc/shadow", uint32(100)))(t)
	must(c.Do(client.Mknod, root, "n", uint32(unix.S_IFREG|0o644), uint32(0), uint32(0), uint32(100)))(t)
	for name, mode := range map[string]uint32{"d": unix.S_IFDIR | 0o1777, "s": unix.S_IFLNK | 0o777, "n": unix.S_IFREG | 0o644} {
		if st := lstat(t, dir, name); st.Mode != mode || st.Uid != 1000 || st.Gid != 100 {
			t.Errorf("%s: mode %o, owner %d:%d", name, st.Mode, st.Uid, st.Gid)
		}
	}
	s := must(c.Walk(root, "s"))(t)
	if b := must(c.Do(client.Readlink, s))(t); string(b[2:]) != "/etc/shadow" {
		t.Errorf("link to %q", b[2:])
	}
	_, err := c.Do(client.Readlink, root)
	wants(t, "readlink of a directory", err, unix.EINVAL)

	d, n := must(c.Walk(root, "d"))(t), must(c.Walk(root, "n"))(t)
	must(c.Do(client.Link, d, n, "hard"))(t)
	must(c.Do(client.Link, d, s, "hardlink"))(t)
	if st := lstat(t, dir, "d/hard"); st.Ino != lstat(t, dir, "n").Ino || st.Nlink != 2 {
		t.Errorf("linked: %+v", st)
	}
	if st := lstat(t, dir, "d/hardlink"); st.Mode&unix.S_IFMT != unix.S_IFLNK {
		t.Errorf("linked symbolic link: mode %o", st.Mode)
	}
	_, err = c.Do(client.Link, d, n, "hard")
	wants(t, "link over a file", err, unix.EEXIST)

	// A fid stays with its file, whatever becomes of the name.
	must(c.Do(client.Renameat, root, "n", d, "m"))(t)
	must(c.Do(client.Renameat, root, "d", root, "e"))(t)
	must(c.Do(client.Renameat, d, "m", root, "n"))(t)
	_, err = c.Do(client.Unlinkat, root, "e", uint32(unix.AT_REMOVEDIR))
	wants(t, "rmdir of a full directory", err, unix.ENOTEMPTY)
	must(c.Do(client.Unlinkat, d, "hard", uint32(0)))(t)
	must(c.Do(client.Unlinkat, d, "hardlink", uint32(0)))(t)
	_, err = c.Do(client.Unlinkat, root, "e", uint32(0))
	wants(t, "unlink of a directory", err, unix.EISDIR)
	must(c.Do(client.Unlinkat, root, "e", uint32(unix.AT_REMOVEDIR)))(t)
	must(c.Do(client.Unlinkat, root, "n", uint32(0)))(t)
	if a, err := c.Stat(n); err != nil || a.Links != 0 {
		t.Errorf("an unlinked file: %+v, %v", a, err)
	}
	if _, err := c.Do(client.Lopen, n, uint32(unix.O_RDWR)); err != nil {
		t.Errorf("open an unlinked file: %v", err)
	}
	_, err = c.Do(client.Mkdir, d, "x", uint32(0o755), uint32(0))
	wants(t, "mkdir in a removed directory", err, unix.ENOENT)
	_, err = c.Do(client.Remove, n)
	wants(t, "remove", err, unix.EOPNOTSUPP)
	_, err = c.Stat(n)
	wants(t, "the fid after remove", err, unix.EBADF)
}

func TestAttributes(t *testing.T) {
	dir, c, root := serve(t)
	f := must(c.Create(root, "f", unix.O_RDWR, 0o600, 100))(t)
	must(c.Write(f, 0, []byte("0123456789")))(t)
	if err := errors.Join(
		c.Set(f, client.SetMode|client.SetUID|client.SetGID|client.SetSize, unix.S_IFREG|0o4321&^0o7000, 7, 8, 4),
		c.Set(f, client.Mtime|client.MtimeTo, 0, 0, 0, 0, 1, 1234567890),
	); err != nil {
		t.Fatal(err)
	}
	if st := lstat(t, dir, "f"); st.Mode != unix.S_IFREG|0o321 || st.Uid != 7 || st.Gid != 8 || st.Size != 4 || st.Mtim.Sec != 1234567890 || st.Atim.Sec == 1 {
		t.Errorf("%+v", st)
	}
	a := must(c.Stat(f))(t)
	if a.Mode != unix.S_IFREG|0o321 || a.UID != 7 || a.GID != 8 || a.Size != 4 || a.Mtime != 1234567890 || a.Links != 1 {
		t.Errorf("%+v", a)
	}
	if err := c.Set(f, client.Mtime, 0, 0, 0, 0); err != nil || lstat(t, dir, "f").Mtim.Sec == 1234567890 {
		t.Errorf("to the host's time: %v", err)
	}
	must(c.Do(client.Symlink, root, "s", "f", uint32(100)))(t)
	s := must(c.Walk(root, "s"))(t)
	if err := errors.Join(c.Set(s, client.SetUID, 0, 9, 0, 0), c.Set(s, client.Mtime|client.MtimeTo, 0, 0, 0, 0, 0, 5)); err != nil {
		t.Error(err)
	}
	if st := lstat(t, dir, "s"); st.Uid != 9 || st.Mtim.Sec != 5 || lstat(t, dir, "f").Uid != 7 {
		t.Errorf("a symbolic link: %+v", st)
	}
	wants(t, "truncate a symbolic link", c.Set(s, client.SetSize, 0, 0, 0, 0), unix.ELOOP)
	wants(t, "truncate a directory", c.Set(root, client.SetSize, 0, 0, 0, 0), unix.EISDIR)

	b := must(c.Do(client.Statfs, root))(t)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || binary.LittleEndian.Uint32(b[4:]) != uint32(st.Bsize) || binary.LittleEndian.Uint64(b[8:]) != st.Blocks {
		t.Errorf("statfs %x, %+v, %v", b, st, err)
	}
}

// Nothing that the guest makes runs with another user's rights on the host.
func TestSetID(t *testing.T) {
	dir, c, root := serve(t)
	for _, bits := range []uint32{unix.S_ISUID, unix.S_ISGID} {
		_, err := c.Create(root, "f", unix.O_RDWR, bits|0o755, 0)
		wants(t, "create", err, unix.EPERM)
		_, err = c.Do(client.Mknod, root, "f", unix.S_IFREG|bits|0o755, uint32(0), uint32(0), uint32(0))
		wants(t, "mknod", err, unix.EPERM)
	}
	f := must(c.Create(root, "f", unix.O_RDWR, 0o755, 0))(t)
	wants(t, "chmod", c.Set(f, client.SetMode, 0o4755, 0, 0, 0), unix.EPERM)
	wants(t, "chmod", c.Set(f, client.SetMode, 0o2755, 0, 0, 0), unix.EPERM)

	// A program of the host's that the guest writes to loses the bits.
	host := filepath.Join(dir, "program")
	for name, change := range map[string]func() error{
		"open": func() error { _, err := c.Open(root, unix.O_RDWR, "program"); return err },
		"truncate": func() error {
			f, err := c.Walk(root, "program")
			return errors.Join(err, c.Set(f, client.SetSize, 0, 0, 0, 1))
		},
		"O_TRUNC": func() error { _, err := c.Open(root, unix.O_RDONLY|unix.O_TRUNC, "program"); return err },
		"create":  func() error { _, err := c.Create(root, "program", unix.O_WRONLY, 0o600, 0); return err },
		"chown": func() error {
			f, err := c.Walk(root, "program")
			return errors.Join(err, c.Set(f, client.SetUID, 0, 0, 0, 0))
		},
	} {
		if err := errors.Join(os.WriteFile(host, []byte("x"), 0o755), os.Chmod(host, 0o755|fs.ModeSetuid|fs.ModeSetgid)); err != nil {
			t.Fatal(err)
		}
		must(c.Open(root, unix.O_RDONLY, "program"))(t)
		if st := lstat(t, dir, "program"); st.Mode != unix.S_IFREG|0o6755 {
			t.Fatalf("mode %o after a read", st.Mode)
		}
		if err := change(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if st := lstat(t, dir, "program"); st.Mode&0o6000 != 0 {
			t.Errorf("%s: mode %o", name, st.Mode)
		}
	}

	// For directories the group's bit is what containers use it for.
	must(c.Do(client.Mkdir, root, "d", uint32(0o755), uint32(55)))(t)
	d := must(c.Walk(root, "d"))(t)
	if err := c.Set(d, client.SetMode, 0o2775, 0, 0, 0); err != nil {
		t.Error(err)
	}
	must(c.Do(client.Mkdir, d, "sub", uint32(0o755), uint32(55)))(t)
	if st := lstat(t, dir, "d/sub"); st.Mode != unix.S_IFDIR|0o2755 || st.Gid != 55 {
		t.Errorf("mode %o, group %d", st.Mode, st.Gid)
	}
}

func TestReaddir(t *testing.T) {
	dir, c, root := serve(t)
	want := []string{".", ".."}
	for i := range 500 {
		name := fmt.Sprintf("%d-%s", i, strings.Repeat("x", i%200))
		want = append(want, name)
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(want)
	d := must(c.Open(root, unix.O_RDONLY))(t)
	for _, count := range []uint32{300, 1000, 1 << 20} {
		names := must(c.Names(d, count))(t)
		slices.Sort(names)
		if !slices.Equal(names, want) {
			t.Errorf("in parts of %d: %d names, want %d", count, len(names), len(want))
		}
	}
	_, err := c.Names(d, 20)
	wants(t, "a part too small", err, unix.EINVAL)
	f := must(c.Open(root, unix.O_RDONLY, want[3]))(t)
	_, err = c.Names(f, 1000)
	wants(t, "a file", err, unix.ENOTDIR)
}

func TestXattrs(t *testing.T) {
	dir, c, root := serve(t)
	must(c.Create(root, "f", unix.O_RDWR, 0o600, 100))(t)
	path := filepath.Join(dir, "f")
	if err := unix.Setxattr(path, "trusted.secret", []byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	set := func(name, value string, size uint64, flags uint32) error {
		f := must(c.Walk(root, "f"))(t)
		if _, err := c.Do(client.XattrCreate, f, name, size, flags); err != nil {
			return err
		}
		if value != "" {
			if _, err := c.Write(f, 0, []byte(value)); err != nil {
				return errors.Join(err, c.Clunk(f))
			}
		}
		return c.Clunk(f)
	}
	get := func(name string) (string, error) {
		f, x := must(c.Walk(root, "f"))(t), c.Fid()
		b, err := c.Do(client.XattrWalk, f, x, name)
		if err != nil {
			return "", err
		}
		size := binary.LittleEndian.Uint64(b)
		b, err = c.Read(x, 0, uint32(size)+10)
		if err == nil && uint64(len(b)) != size {
			err = fmt.Errorf("%d bytes, said to be %d", len(b), size)
		}
		return string(b), errors.Join(err, c.Clunk(x))
	}
	if err := set("user.a", "value", 5, 0); err != nil {
		t.Fatal(err)
	}
	if v, err := get("user.a"); err != nil || v != "value" {
		t.Errorf("%q, %v", v, err)
	}
	if list, err := get(""); err != nil || list != "user.a\x00" {
		t.Errorf("%q, %v", list, err)
	}
	wants(t, "XATTR_CREATE", set("user.a", "b", 1, unix.XATTR_CREATE), unix.EEXIST)
	wants(t, "XATTR_REPLACE", set("user.c", "b", 1, unix.XATTR_REPLACE), unix.ENODATA)
	wants(t, "too little", set("user.a", "abc", 4, 0), unix.EINVAL)
	wants(t, "too much", set("user.a", "abc", 2, 0), unix.EINVAL)
	wants(t, "too large", set("user.a", "", 1<<40, 0), unix.E2BIG)
	for _, name := range []string{"security.capability", "trusted.secret", "system.posix_acl_access", "user", ""} {
		wants(t, "set "+name, set(name, "b", 1, 0), unix.EOPNOTSUPP)
		if name != "" {
			_, err := get(name)
			wants(t, "get "+name, err, unix.EOPNOTSUPP)
		}
	}
	if err := set("user.a", "", 0, unix.XATTR_REPLACE); err != nil {
		t.Error(err)
	}
	_, err := get("user.a")
	wants(t, "removed", err, unix.ENODATA)
	large := strings.Repeat("v", 2000)
	if err := set("user.l", large, 2000, 0); err != nil {
		t.Error(err)
	}
	if v, err := get("user.l"); err != nil || v != large {
		t.Errorf("%d bytes, %v", len(v), err)
	}
}

// Locks are granted: the client's kernel knows its own.
func TestLocks(t *testing.T) {
	_, c, root := serve(t)
	f := must(c.Create(root, "f", unix.O_RDWR, 0o600, 100))(t)
	if b := must(c.Do(client.Lock, f, uint8(1), uint32(1), uint64(0), uint64(0), uint32(77), "node"))(t); !bytes.Equal(b, []byte{0}) {
		t.Errorf("lock: %x", b)
	}
	b := must(c.Do(client.Getlock, f, uint8(1), uint64(3), uint64(4), uint32(77), "node"))(t)
	if want := client.Message(0, uint8(2), uint64(3), uint64(4), uint32(77), "node")[7:]; !bytes.Equal(b, want) {
		t.Errorf("getlock: %x, want %x", b, want)
	}
}
