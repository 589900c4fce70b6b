package ninep

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// MaxFIDs is how many files all connections of a server together may hold on to. A fid has up to two descriptors.
	MaxFIDs = 16384
	// version is the one that is spoken.
	version = "9P2000.L"
	// noFID and noUser stand for none.
	noFID  = ^uint32(0)
	noUser = ^uint32(0)
)

// Server counts what its connections hold. The zero value is ready.
type Server struct {
	fids atomic.Int64
}

// conn is one connection's state.
type conn struct {
	server  *Server
	root    int // descriptor
	rootDev uint64
	msize   uint32 // 0 before the version is agreed on
	fids    map[uint32]*fid
	xattrs  int // fids that are extended attributes
}

// handler takes a request apart, does it, and adds the answer's fields. An error that isn't errMalformed is the answer.
type handler func(*conn, *reader, *writer) error

// handlers are by type of request. What the client has another way for (Trename, Tremove) is left out.
var handlers = map[uint8]handler{
	tversion:     (*conn).agree,
	tattach:      (*conn).attach,
	tflush:       (*conn).flush,
	twalk:        (*conn).walk,
	tclunk:       (*conn).clunk,
	tremove:      (*conn).remove,
	tlopen:       (*conn).open,
	tlcreate:     (*conn).create,
	tread:        (*conn).read,
	twrite:       (*conn).write,
	tfsync:       (*conn).fsync,
	tlock:        (*conn).lock,
	tgetlock:     (*conn).getlock,
	treaddir:     (*conn).readdir,
	tmkdir:       (*conn).mkdir,
	tmknod:       (*conn).mknod,
	tsymlink:     (*conn).symlink,
	tlink:        (*conn).link,
	trenameat:    (*conn).rename,
	tunlinkat:    (*conn).unlink,
	treadlink:    (*conn).readlink,
	tgetattr:     (*conn).getattr,
	tsetattr:     (*conn).setattr,
	tstatfs:      (*conn).statfs,
	txattrwalk:   (*conn).xattrWalk,
	txattrcreate: (*conn).xattrCreate,
}

// Serve answers the requests that come from rw, about the directory that root is a descriptor of, until rw ends or the
// client breaks the protocol. It leaves rw and root open.
func (s *Server) Serve(rw io.ReadWriter, root int) error {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return err
	}
	c := &conn{server: s, root: root, rootDev: st.Dev, fids: make(map[uint32]*fid)}
	defer c.clunkAll()
	in := bufio.NewReaderSize(rw, minMessage)
	var header [headerSize]byte
	var body []byte
	var out writer
	for {
		if _, err := io.ReadFull(in, header[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		size := binary.LittleEndian.Uint32(header[:])
		if size < headerSize || size > max(c.msize, minMessage) {
			return fmt.Errorf("%w: of %d bytes", errMalformed, size)
		}
		if n := int(size - headerSize); n > cap(body) {
			body = make([]byte, n)
		} else {
			body = body[:n]
		}
		if _, err := io.ReadFull(in, body); err != nil {
			return fmt.Errorf("in the middle of a message: %w", err)
		}
		if err := c.answer(header[4], binary.LittleEndian.Uint16(header[5:]), body, &out); err != nil {
			return err
		}
		if _, err := rw.Write(out.b); err != nil {
			return err
		}
	}
}

// answer leaves the answer to a request in out. An error ends the connection.
func (c *conn) answer(kind uint8, tag uint16, body []byte, out *writer) error {
	out.begin()
	var err error = unix.EOPNOTSUPP
	if c.msize == 0 && kind != tversion {
		return fmt.Errorf("%w: type %d before the version", errMalformed, kind)
	}
	if do, ok := handlers[kind]; ok {
		err = do(c, &reader{b: body}, out)
	}
	if err == nil {
		out.finish(kind+1, tag)
		return nil
	}
	if errors.Is(err, errMalformed) {
		return fmt.Errorf("%w: type %d", err, kind)
	}
	var errno unix.Errno
	if !errors.As(err, &errno) {
		errno = unix.EIO
	}
	out.begin()
	out.u32(uint32(errno))
	out.finish(rlerror, tag)
	return nil
}

// agree is Tversion: the beginning, of a session over an open connection too.
func (c *conn) agree(in *reader, out *writer) error {
	msize, ver := in.u32(), in.string()
	if err := in.end(); err != nil {
		return err
	}
	if msize < minMessage {
		return fmt.Errorf("%w: messages of %d bytes", errMalformed, msize)
	}
	c.clunkAll()
	c.msize = min(msize, maxMessage)
	out.u32(c.msize)
	if ver == version {
		out.string(version)
	} else {
		out.string("unknown")
	}
	return nil
}

// flush needs nothing done: what is to be flushed has been answered.
func (c *conn) flush(in *reader, _ *writer) error {
	in.u16()
	return in.end()
}

func (c *conn) attach(in *reader, out *writer) error {
	id, auth, _, name, user := in.u32(), in.u32(), in.string(), in.string(), in.u32()
	if err := in.end(); err != nil {
		return err
	}
	if auth != noFID {
		return unix.EOPNOTSUPP
	}
	if name != "" && name != "/" {
		return unix.ENOENT
	}
	if user == noUser { // the client's own, not for a user
		user = 0
	}
	f, err := openNode(c.root, user)
	if err != nil {
		return err
	}
	q, err := c.identify(f)
	if err == nil {
		err = c.add(id, f)
	}
	if err != nil {
		f.close()
		return err
	}
	out.qid(q)
	return nil
}

func (c *conn) walk(in *reader, out *writer) error {
	id, newID, n := in.u32(), in.u32(), int(in.u16())
	if n > maxWalk {
		return errMalformed
	}
	names := make([]string, n)
	for i := range names {
		names[i] = in.string()
	}
	if err := in.end(); err != nil {
		return err
	}
	f, err := c.fid(id)
	if err != nil {
		return err
	}
	if newID == id && f.file >= 0 || newID != id && c.fids[newID] != nil {
		return unix.EBADF
	}
	to, err := openNode(f.node, f.uid)
	if err != nil {
		return err
	}
	to.kind = f.kind
	var qids []qid
	for _, name := range names {
		var q qid
		if err = to.step(name); err == nil {
			q, err = c.identify(to)
		}
		if err != nil {
			break
		}
		qids = append(qids, q)
	}
	switch {
	case err != nil && len(qids) == 0:
		to.close()
		return err
	case err != nil: // an answer with fewer names says so
		to.close()
	case newID == id:
		f.close()
		c.fids[id] = to
	default:
		if err := c.add(newID, to); err != nil {
			to.close()
			return err
		}
	}
	out.u16(uint16(len(qids)))
	for _, q := range qids {
		out.qid(q)
	}
	return nil
}

func (c *conn) clunk(in *reader, _ *writer) error {
	id := in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, ok := c.fids[id]
	if !ok {
		return unix.EBADF
	}
	defer c.drop(id, f)
	if f.xattr != nil {
		return f.xattr.store(f)
	}
	return nil
}

// remove only does the half of it that the client counts on; for the other half it uses Tunlinkat.
func (c *conn) remove(in *reader, _ *writer) error {
	id := in.u32()
	if err := in.end(); err != nil {
		return err
	}
	f, ok := c.fids[id]
	if !ok {
		return unix.EBADF
	}
	c.drop(id, f)
	return unix.EOPNOTSUPP
}
