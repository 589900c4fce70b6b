package ninep

import (
	"bytes"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// userPrefix is the one name space of extended attributes that is served.
	userPrefix = "user."
	// maxXattr is Linux' XATTR_SIZE_MAX and XATTR_LIST_MAX.
	maxXattr = 64 << 10
	// maxXattrs is how many a connection may read or write at a time: their contents are in memory.
	maxXattrs = 16
)

// xattr is what a fid of an extended attribute, or of the list of them, has.
type xattr struct {
	content []byte
	// For writing: content is complete at its full capacity, and set when the fid is clunked.
	name  string
	size  int
	flags int
	set   bool
}

// xattr returns what the fid reads or writes, or nil if it is a file's.
func (c *conn) xattr(id uint32) *xattr {
	if f := c.fids[id]; f != nil {
		return f.xattr
	}
	return nil
}

// xattrWalk makes a fid of an attribute's content, or, without a name, of the names.
func (c *conn) xattrWalk(in *reader, out *writer) error {
	id, newID, name := in.u32(), in.u32(), in.string()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if c.xattrs >= maxXattrs {
		return unix.EMFILE
	}
	content, err := f.readXattr(name)
	if err != nil {
		return err
	}
	to, err := openNode(f.node, f.uid)
	if err != nil {
		return err
	}
	to.xattr = &xattr{content: content}
	if err := c.add(newID, to); err != nil {
		to.close()
		return err
	}
	c.xattrs++
	out.u64(uint64(len(content)))
	return nil
}

func (f *fid) readXattr(name string) ([]byte, error) {
	if name != "" {
		if err := checkXattr(name); err != nil {
			return nil, err
		}
		return readAll(func(b []byte) (int, error) { return unix.Getxattr(f.proc(), name, b) })
	}
	list, err := readAll(func(b []byte) (int, error) { return unix.Listxattr(f.proc(), b) })
	if err != nil {
		return nil, err
	}
	var names []byte
	for name := range bytes.SplitAfterSeq(list, []byte{0}) {
		if bytes.HasPrefix(name, []byte(userPrefix)) {
			names = append(names, name...)
		}
	}
	return names, nil
}

// readAll asks for the size first: most attributes are small.
func readAll(get func([]byte) (int, error)) ([]byte, error) {
	n, err := get(nil)
	if err != nil || n == 0 {
		return nil, err
	}
	if n > maxXattr {
		return nil, unix.E2BIG
	}
	b := make([]byte, n)
	if n, err = get(b); err != nil {
		return nil, err
	}
	return b[:n], nil
}

// checkXattr refuses attributes that mean something to the host.
func checkXattr(name string) error {
	switch {
	case !strings.HasPrefix(name, userPrefix):
		return unix.EOPNOTSUPP
	case len(name) > maxName:
		return unix.ERANGE
	case strings.ContainsRune(name, 0):
		return unix.EINVAL
	}
	return nil
}

// xattrCreate makes the fid of a file that of one of its attributes, which is written and then set by Tclunk. The size 0
// means to remove it.
func (c *conn) xattrCreate(in *reader, _ *writer) error {
	id, name, size, flags := in.u32(), in.string(), in.u64(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if err := checkXattr(name); err != nil {
		return err
	}
	switch {
	case f.file >= 0:
		return unix.EBADF
	case size > maxXattr:
		return unix.E2BIG
	case flags&^(unix.XATTR_CREATE|unix.XATTR_REPLACE) != 0:
		return unix.EINVAL
	case c.xattrs >= maxXattrs:
		return unix.EMFILE
	}
	f.xattr = &xattr{name: name, size: int(size), flags: int(flags), set: true}
	c.xattrs++
	return nil
}

func (x *xattr) read(off uint64, count uint32, out *writer) error {
	if x.set {
		return unix.EBADF
	}
	rest := x.content[min(off, uint64(len(x.content))):]
	rest = rest[:min(uint64(count), uint64(len(rest)))]
	out.u32(uint32(len(rest)))
	out.b = append(out.b, rest...)
	return nil
}

// write takes the content in its order.
func (x *xattr) write(off uint64, data []byte, out *writer) error {
	if !x.set {
		return unix.EBADF
	}
	if off != uint64(len(x.content)) || len(data) > x.size-len(x.content) {
		return unix.EINVAL
	}
	x.content = append(x.content, data...)
	out.u32(uint32(len(data)))
	return nil
}

// store sets or removes the attribute, if it is to be.
func (x *xattr) store(f *fid) error {
	switch {
	case !x.set:
		return nil
	case x.size == 0:
		return unix.Removexattr(f.proc(), x.name)
	case len(x.content) < x.size:
		return unix.EINVAL
	}
	return unix.Setxattr(f.proc(), x.name, x.content, x.flags)
}
