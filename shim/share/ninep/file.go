package ninep

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// Flags of Tlopen and Tlcreate. Their access modes are Linux'.
const (
	flagCreate    = 0o100
	flagExclusive = 0o200
	flagTruncate  = 0o1000
	flagAppend    = 0o2000
	flagDataSync  = 0o10000
	flagDirectory = 0o200000
	flagSync      = 0o4000000
)

// hostFlags are those that matter to the host; others are the client's business.
func hostFlags(flags uint32) (int, error) {
	host := int(flags & unix.O_ACCMODE)
	if host == unix.O_ACCMODE {
		return 0, unix.EINVAL
	}
	for _, f := range []struct {
		flag uint32
		host int
	}{
		{flagTruncate, unix.O_TRUNC},
		{flagAppend, unix.O_APPEND},
		{flagDataSync, unix.O_DSYNC},
		{flagSync, unix.O_SYNC},
		{flagDirectory, unix.O_DIRECTORY},
	} {
		if flags&f.flag != 0 {
			host |= f.host
		}
	}
	return host, nil
}

func (c *conn) open(in *reader, out *writer) error {
	id, flags := in.u32(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if err := f.open(flags); err != nil {
		return err
	}
	q, err := c.identify(f)
	if err != nil {
		return err
	}
	out.qid(q)
	out.u32(0) // iounit: as much as a message holds
	return nil
}

func (f *fid) open(flags uint32) error {
	if f.file >= 0 {
		return unix.EBADF
	}
	host, err := hostFlags(flags)
	if err != nil {
		return err
	}
	fd, err := f.reopen(host)
	if err != nil {
		return err
	}
	if host&(unix.O_ACCMODE|unix.O_TRUNC) != 0 {
		if err := stripSetID(fd); err != nil {
			_ = unix.Close(fd)
			return err
		}
	}
	f.file = fd
	return nil
}

// stripSetID keeps the content of a file that is about to change from running with another user's rights on the host. The
// kernel would do that by itself at the first write, were it not for CAP_FSETID.
func stripSetID(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 {
		return nil
	}
	return unix.Fchmod(fd, st.Mode&0o1777)
}

// create makes the fid of a directory that of a file in it, opened.
func (c *conn) create(in *reader, out *writer) error {
	id, name, flags, mode, gid := in.u32(), in.string(), in.u32(), in.u32(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	d, err := c.dir(id)
	if err != nil {
		return err
	}
	if d.file >= 0 {
		return unix.EBADF
	}
	host, err := hostFlags(flags)
	if err != nil {
		return err
	}
	f := &fid{file: -1, uid: d.uid}
	f.node, err = makeFile(d, name, host&^(unix.O_TRUNC|unix.O_DIRECTORY), mode, gid)
	switch {
	case err == nil:
		f.file = f.node
	case err == unix.EEXIST && flags&flagExclusive == 0:
		err = f.openExisting(c, d, name, flags)
	}
	if err != nil {
		return err
	}
	q, err := c.identify(f)
	if err != nil {
		f.close()
		return err
	}
	d.close()
	c.fids[id] = f
	out.qid(q)
	out.u32(0)
	return nil
}

func (f *fid) openExisting(c *conn, d *fid, name string, flags uint32) (err error) {
	if f.node, err = lookup(d.node, name, unix.O_PATH, 0); err != nil {
		return err
	}
	if _, err = c.identify(f); err == nil {
		err = f.open(flags)
	}
	if err != nil {
		f.close()
	}
	return err
}

// makeFile makes a regular file and opens it.
func makeFile(d *fid, name string, flags int, mode, gid uint32) (fd int, err error) {
	if err := checkMode(unix.S_IFREG, mode); err != nil {
		return -1, err
	}
	fd, err = lookup(d.node, name, uint64(flags)|unix.O_CREAT|unix.O_EXCL, mode&0o1777)
	if err != nil {
		return -1, err
	}
	if err := give(fd, d.uid, gid); err != nil {
		_ = unix.Unlinkat(d.node, name, 0)
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// give makes the file that fd is a descriptor of the user's who has made it.
func give(fd int, uid, gid uint32) error {
	if gid == noUser { // for the kernel this means to leave the group
		return unix.EINVAL
	}
	return unix.Fchownat(fd, "", int(uid), int(gid), unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
}

// checkMode refuses files that give their user another's rights on the host. For directories the bits have a harmless meaning.
func checkMode(kind, mode uint32) error {
	if kind != unix.S_IFDIR && mode&(unix.S_ISUID|unix.S_ISGID) != 0 {
		return unix.EPERM
	}
	return nil
}

func (c *conn) read(in *reader, out *writer) error {
	id, off, count := in.u32(), in.u64(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	if x := c.xattr(id); x != nil {
		return x.read(off, min(count, c.msize-headerSize-4), out)
	}
	f, err := c.opened(id)
	if err != nil {
		return err
	}
	pos, err := offset(off)
	if err != nil {
		return err
	}
	count = min(count, c.msize-headerSize-4)
	out.u32(0)
	start := len(out.b)
	buf := slices.Grow(out.b, int(count))[:start+int(count)]
	n, err := again(func() (int, error) { return unix.Pread(f.file, buf[start:], pos) })
	if err != nil {
		return err
	}
	out.b = buf[:start+n]
	binary.LittleEndian.PutUint32(out.b[headerSize:], uint32(n))
	return nil
}

func (c *conn) write(in *reader, out *writer) error {
	id, off, count := in.u32(), in.u64(), in.u32()
	data := in.data(count)
	if err := in.end(); err != nil {
		return err
	}
	if x := c.xattr(id); x != nil {
		return x.write(off, data, out)
	}
	f, err := c.opened(id)
	if err != nil {
		return err
	}
	pos, err := offset(off)
	if err != nil {
		return err
	}
	n, err := again(func() (int, error) { return unix.Pwrite(f.file, data, pos) })
	if err != nil {
		return err
	}
	out.u32(uint32(n))
	return nil
}

func (c *conn) fsync(in *reader, _ *writer) error {
	id, dataOnly := in.u32(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.opened(id)
	if err != nil {
		return err
	}
	sync := unix.Fsync
	if dataOnly != 0 {
		sync = unix.Fdatasync
	}
	_, err = again(func() (struct{}, error) { return struct{}{}, sync(f.file) })
	return err
}

// lock grants everything: see the package's comment.
func (c *conn) lock(in *reader, out *writer) error {
	const success = 0
	id := in.u32()
	in.u8()     // type
	in.u32()    // flags
	in.u64()    // start
	in.u64()    // length
	in.u32()    // process
	in.string() // client
	if err := in.end(); err != nil {
		return err
	}
	if _, err := c.opened(id); err != nil {
		return err
	}
	out.u8(success)
	return nil
}

func (c *conn) getlock(in *reader, out *writer) error {
	const unlocked = 2
	id := in.u32()
	in.u8() // type
	start, length, process, client := in.u64(), in.u64(), in.u32(), in.string()
	if err := in.end(); err != nil {
		return err
	}
	if _, err := c.opened(id); err != nil {
		return err
	}
	if len(client) > maxName {
		return unix.EINVAL
	}
	out.u8(unlocked)
	out.u64(start)
	out.u64(length)
	out.u32(process)
	out.string(client)
	return nil
}
