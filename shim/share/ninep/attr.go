package ninep

import (
	"golang.org/x/sys/unix"
)

// Bits of Tgetattr and Tsetattr.
const (
	attrBasic = 0x7ff // mode to blocks

	setMode    = 0x1
	setUID     = 0x2
	setGID     = 0x4
	setSize    = 0x8
	setAtime   = 0x10 // to the host's time, unless with setAtimeTo
	setMtime   = 0x20
	setAtimeTo = 0x80
	setMtimeTo = 0x100
	magic      = 0x01021997 // V9FS_MAGIC, the type that statfs(2) tells
)

func (c *conn) getattr(in *reader, out *writer) error {
	id := in.u32()
	in.u64() // which ones: all are at hand
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(f.node, &st); err != nil {
		return err
	}
	out.u64(attrBasic)
	out.qid(c.qidOf(st.Mode, st.Dev, st.Ino))
	out.u32(st.Mode)
	out.u32(st.Uid)
	out.u32(st.Gid)
	out.u64(st.Nlink)
	out.u64(0) // device number: in the guest it would mean a device of the guest
	out.u64(uint64(st.Size))
	out.u64(uint64(st.Blksize))
	out.u64(uint64(st.Blocks))
	for _, t := range []unix.Timespec{st.Atim, st.Mtim, st.Ctim, {}} { // the last is that of birth
		out.u64(uint64(t.Sec))
		out.u64(uint64(t.Nsec))
	}
	out.u64(0) // generation
	out.u64(0) // data version
	return nil
}

// attributes are Tsetattr's.
type attributes struct {
	valid, mode, uid, gid uint32
	size                  uint64
	times                 [2]unix.Timespec // of access, of modification
}

func (c *conn) setattr(in *reader, _ *writer) error {
	id := in.u32()
	a := attributes{valid: in.u32(), mode: in.u32(), uid: in.u32(), gid: in.u32(), size: in.u64()}
	for i := range a.times {
		a.times[i] = unix.Timespec{Sec: int64(in.u64()), Nsec: int64(in.u64())}
	}
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if a.valid&setMode != 0 {
		if err := checkMode(f.kind, a.mode); err != nil {
			return err
		}
	}
	for _, set := range []func(*fid) error{a.setSize, a.setOwner, a.setMode, a.setTimes} {
		if err := set(f); err != nil {
			return err
		}
	}
	return nil
}

func (a *attributes) setSize(f *fid) error {
	if a.valid&setSize == 0 {
		return nil
	}
	size, err := offset(a.size)
	if err != nil {
		return err
	}
	fd, err := f.reopen(unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := stripSetID(fd); err != nil {
		return err
	}
	_, err = again(func() (struct{}, error) { return struct{}{}, unix.Ftruncate(fd, size) })
	return err
}

// setOwner takes set-uid and set-gid bits of files away, as chown(2) does.
func (a *attributes) setOwner(f *fid) error {
	uid, gid := -1, -1
	if a.valid&setUID != 0 && a.uid != noUser {
		uid = int(a.uid)
	}
	if a.valid&setGID != 0 && a.gid != noUser {
		gid = int(a.gid)
	}
	if uid == -1 && gid == -1 {
		return nil
	}
	return unix.Fchownat(f.node, "", uid, gid, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
}

func (a *attributes) setMode(f *fid) error {
	if a.valid&setMode == 0 {
		return nil
	}
	return unix.Fchmodat(unix.AT_FDCWD, f.proc(), a.mode&0o7777, 0)
}

func (a *attributes) setTimes(f *fid) error {
	if a.valid&(setAtime|setMtime) == 0 {
		return nil
	}
	times := a.times
	for i, bit := range []struct{ set, to uint32 }{{setAtime, setAtimeTo}, {setMtime, setMtimeTo}} {
		switch {
		case a.valid&bit.set == 0:
			times[i].Nsec = unix.UTIME_OMIT
		case a.valid&bit.to == 0:
			times[i].Nsec = unix.UTIME_NOW
		case times[i].Nsec < 0 || times[i].Nsec >= 1e9:
			return unix.EINVAL
		}
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, f.proc(), times[:], 0)
}

func (c *conn) statfs(in *reader, out *writer) error {
	id := in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	if _, err := again(func() (struct{}, error) { return struct{}{}, unix.Fstatfs(f.node, &st) }); err != nil {
		return err
	}
	out.u32(magic)
	out.u32(uint32(st.Bsize))
	out.u64(st.Blocks)
	out.u64(st.Bfree)
	out.u64(st.Bavail)
	out.u64(st.Files)
	out.u64(st.Ffree)
	out.u64(0) // id: the host's means nothing
	out.u32(maxName)
	return nil
}
