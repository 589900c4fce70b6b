package ninep

import (
	"strconv"

	"golang.org/x/sys/unix"
)

// beneath is how all names are resolved.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// fid is what the client holds on to: a file, opened or not, or an extended attribute of one.
type fid struct {
	node  int    // descriptor, with O_PATH unless it is the same as file
	file  int    // descriptor, -1 until opened
	kind  uint32 // the file's S_IFMT bits
	uid   uint32 // of the user for whom the client acts
	xattr *xattr
}

// openNode makes a fid of the file that node is a descriptor of.
func openNode(node int, uid uint32) (*fid, error) {
	fd, err := unix.FcntlInt(uintptr(node), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &fid{node: fd, file: -1, uid: uid}, nil
}

// lookup opens an entry of a directory. A symbolic link can only be opened with O_PATH.
func lookup(dir int, name string, flags uint64, mode uint32) (int, error) {
	if err := checkName(name); err != nil {
		return -1, err
	}
	how := unix.OpenHow{Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC, Mode: uint64(mode), Resolve: beneath}
	return again(func() (int, error) { return unix.Openat2(dir, name, &how) })
}

// step goes to an entry of the directory that f is.
func (f *fid) step(name string) error {
	fd, err := lookup(f.node, name, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	_ = unix.Close(f.node)
	f.node = fd
	return nil
}

// proc is a path of the file itself, whatever its name is.
func (f *fid) proc() string { return "/proc/self/fd/" + strconv.Itoa(f.node) }

// reopen opens a regular file or a directory. Opening anything else may have effects, or wait.
func (f *fid) reopen(flags int) (int, error) {
	switch f.kind {
	case unix.S_IFREG, unix.S_IFDIR:
		return again(func() (int, error) { return unix.Open(f.proc(), flags|unix.O_CLOEXEC|unix.O_NOCTTY, 0) })
	case unix.S_IFLNK:
		return -1, unix.ELOOP
	}
	return -1, unix.EPERM
}

func (f *fid) close() {
	if f.file >= 0 && f.file != f.node {
		_ = unix.Close(f.file)
	}
	_ = unix.Close(f.node)
}

// identify finds out what f is.
func (c *conn) identify(f *fid) (qid, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.node, &st); err != nil {
		return qid{}, err
	}
	f.kind = st.Mode & unix.S_IFMT
	return c.qidOf(st.Mode, st.Dev, st.Ino), nil
}

// fid returns a file.
func (c *conn) fid(id uint32) (*fid, error) {
	f, ok := c.fids[id]
	if !ok || f.xattr != nil {
		return nil, unix.EBADF
	}
	return f, nil
}

// dir returns a directory.
func (c *conn) dir(id uint32) (*fid, error) {
	f, err := c.fid(id)
	if err == nil && f.kind != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	return f, err
}

// opened returns a file that has been opened.
func (c *conn) opened(id uint32) (*fid, error) {
	f, err := c.fid(id)
	if err == nil && f.file < 0 {
		err = unix.EBADF
	}
	return f, err
}

// add makes f the client's. On error it stays the caller's.
func (c *conn) add(id uint32, f *fid) error {
	if id == noFID || c.fids[id] != nil {
		return unix.EBADF
	}
	if c.server.fids.Add(1) > MaxFIDs {
		c.server.fids.Add(-1)
		return unix.EMFILE
	}
	c.fids[id] = f
	return nil
}

// drop ends a fid.
func (c *conn) drop(id uint32, f *fid) {
	if f.xattr != nil {
		c.xattrs--
	}
	f.close()
	delete(c.fids, id)
	c.server.fids.Add(-1)
}

func (c *conn) clunkAll() {
	for id, f := range c.fids {
		c.drop(id, f)
	}
}
