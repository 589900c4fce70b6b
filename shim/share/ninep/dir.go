package ninep

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// maxEntries bounds what of a directory is read at once, in bytes.
const maxEntries = 64 << 10

// readdir answers with as many entries as fit. Offsets are the host's.
func (c *conn) readdir(in *reader, out *writer) error {
	id, off, count := in.u32(), in.u64(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.opened(id)
	if err != nil {
		return err
	}
	if f.kind != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	pos, err := offset(off)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(f.file, &st); err != nil {
		return err
	}
	if _, err := unix.Seek(f.file, pos, unix.SEEK_SET); err != nil {
		return err
	}
	count = min(count, c.msize-headerSize-4, maxEntries)
	buf := make([]byte, count)
	n, err := again(func() (int, error) { return unix.Getdents(f.file, buf) })
	if err != nil {
		return err
	}
	out.u32(0)
	start := len(out.b)
	for buf = buf[:n]; len(buf) > 0; {
		e, size := parseDirent(buf)
		buf = buf[size:]
		if len(out.b)-start+qidSize+8+1+2+len(e.name) > int(count) {
			if len(out.b) == start {
				return unix.EINVAL // not one fits, as with getdents(2)
			}
			break
		}
		out.qid(c.qidOf(uint32(e.kind)<<12, st.Dev, e.ino)) // an S_IFMT is a DT_ with 12 bits below
		out.u64(e.off)
		out.u8(e.kind)
		out.string(string(e.name))
	}
	binary.LittleEndian.PutUint32(out.b[headerSize:], uint32(len(out.b)-start))
	return nil
}

// dirent is one of getdents64(2).
type dirent struct {
	ino, off uint64
	kind     uint8 // DT_…
	name     []byte
}

func parseDirent(b []byte) (e dirent, size int) {
	const fixed = 8 + 8 + 2 + 1
	size = int(binary.NativeEndian.Uint16(b[16:]))
	e = dirent{ino: binary.NativeEndian.Uint64(b), off: binary.NativeEndian.Uint64(b[8:]), kind: b[18]}
	e.name, _, _ = bytes.Cut(b[fixed:size], []byte{0})
	return e, size
}

func (c *conn) mkdir(in *reader, out *writer) error {
	id, name, mode, gid := in.u32(), in.string(), in.u32(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(id)
	if err != nil {
		return err
	}
	if err := checkName(name); err != nil {
		return err
	}
	if err := unix.Mkdirat(d.node, name, mode&0o1777); err != nil {
		return err
	}
	return c.entered(d, name, gid, unix.AT_REMOVEDIR, out)
}

// mknod makes regular files only: see the package's comment.
func (c *conn) mknod(in *reader, out *writer) error {
	id, name, mode := in.u32(), in.string(), in.u32()
	in.u32() // major
	in.u32() // minor
	gid := in.u32()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(id)
	if err != nil {
		return err
	}
	if kind := mode & unix.S_IFMT; kind != unix.S_IFREG && kind != 0 {
		return unix.EPERM
	}
	fd, err := makeFile(d, name, unix.O_WRONLY, mode, gid)
	if err != nil {
		return err
	}
	f := &fid{node: fd, file: fd}
	defer f.close()
	q, err := c.identify(f)
	if err != nil {
		return err
	}
	out.qid(q)
	return nil
}

func (c *conn) symlink(in *reader, out *writer) error {
	id, name, target, gid := in.u32(), in.string(), in.string(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(id)
	if err != nil {
		return err
	}
	if err := checkName(name); err != nil {
		return err
	}
	if err := unix.Symlinkat(target, d.node, name); err != nil {
		return err
	}
	return c.entered(d, name, gid, 0, out)
}

// entered gives an entry that has been made its owner and answers with its qid. If that fails it removes the entry, with
// flags.
func (c *conn) entered(d *fid, name string, gid uint32, flags int, out *writer) error {
	f := &fid{file: -1}
	var err error
	if f.node, err = lookup(d.node, name, unix.O_PATH, 0); err != nil {
		return err
	}
	defer f.close()
	if err := give(f.node, d.uid, gid); err != nil {
		_ = unix.Unlinkat(d.node, name, flags)
		return err
	}
	q, err := c.identify(f)
	if err != nil {
		return err
	}
	out.qid(q)
	return nil
}

func (c *conn) link(in *reader, _ *writer) error {
	dirID, id, name := in.u32(), in.u32(), in.string()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(dirID)
	if err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if err := checkName(name); err != nil {
		return err
	}
	return unix.Linkat(unix.AT_FDCWD, f.proc(), d.node, name, unix.AT_SYMLINK_FOLLOW)
}

func (c *conn) rename(in *reader, _ *writer) error {
	fromID, from, toID, to := in.u32(), in.string(), in.u32(), in.string()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(fromID)
	if err != nil {
		return err
	}
	t, err := c.dir(toID)
	if err != nil {
		return err
	}
	for _, name := range []string{from, to} {
		if err := checkName(name); err != nil {
			return err
		}
	}
	return unix.Renameat2(d.node, from, t.node, to, 0)
}

func (c *conn) unlink(in *reader, _ *writer) error {
	id, name, flags := in.u32(), in.string(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(id)
	if err != nil {
		return err
	}
	if err := checkName(name); err != nil {
		return err
	}
	return unix.Unlinkat(d.node, name, int(flags&unix.AT_REMOVEDIR))
}

func (c *conn) readlink(in *reader, out *writer) error {
	id := in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if f.kind != unix.S_IFLNK {
		return unix.EINVAL
	}
	target := make([]byte, maxPath+1)
	n, err := unix.Readlinkat(f.node, "", target)
	if err != nil {
		return err
	}
	if n > maxPath || n > int(c.msize)-headerSize-2 {
		return unix.ENAMETOOLONG
	}
	out.string(string(target[:n]))
	return nil
}
