// Package client is a 9P2000.L client for the tests of those who serve it. It says whatever it is told to, wrong or right.
package client

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"
)

// Types of requests.
const (
	Statfs      = 8
	Lopen       = 12
	Lcreate     = 14
	Symlink     = 16
	Mknod       = 18
	Readlink    = 22
	Getattr     = 24
	Setattr     = 26
	XattrWalk   = 30
	XattrCreate = 32
	Readdir     = 40
	Fsync       = 50
	Lock        = 52
	Getlock     = 54
	Link        = 70
	Mkdir       = 72
	Renameat    = 74
	Unlinkat    = 76
	Version     = 100
	Attach      = 104
	Flush       = 108
	Walk        = 110
	Read        = 116
	Write       = 118
	Clunk       = 120
	Remove      = 122

	lerror     = 7
	headerSize = 7
)

// None stands for no fid and no user.
const None = ^uint32(0)

// Client is a session. It is not safe for concurrent use.
type Client struct {
	rw    io.ReadWriter
	next  uint32
	MSize uint32
}

// New agrees on the version.
func New(rw io.ReadWriter) (*Client, error) {
	c := &Client{rw: rw}
	b, err := c.Do(Version, uint32(1<<20), "9P2000.L")
	if err != nil {
		return nil, err
	}
	if len(b) < 6 || string(b[6:]) != "9P2000.L" {
		return nil, fmt.Errorf("version %q", b)
	}
	c.MSize = binary.LittleEndian.Uint32(b)
	return c, nil
}

// Message is a request.
func Message(kind uint8, fields ...any) []byte {
	b := []byte{0, 0, 0, 0, kind, 1, 0}
	for _, f := range fields {
		switch f := f.(type) {
		case uint8:
			b = append(b, f)
		case uint16:
			b = binary.LittleEndian.AppendUint16(b, f)
		case uint32:
			b = binary.LittleEndian.AppendUint32(b, f)
		case uint64:
			b = binary.LittleEndian.AppendUint64(b, f)
		case string:
			b = append(binary.LittleEndian.AppendUint16(b, uint16(len(f))), f...)
		case []byte:
			b = append(b, f...)
		default:
			panic(fmt.Sprintf("a field of type %T", f))
		}
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)))
	return b
}

// Do sends a request and returns the answer's body, or the errno that is the answer.
func (c *Client) Do(kind uint8, fields ...any) ([]byte, error) {
	if _, err := c.rw.Write(Message(kind, fields...)); err != nil {
		return nil, err
	}
	header := make([]byte, headerSize)
	if _, err := io.ReadFull(c.rw, header); err != nil {
		return nil, err
	}
	body := make([]byte, binary.LittleEndian.Uint32(header)-headerSize)
	if _, err := io.ReadFull(c.rw, body); err != nil {
		return nil, err
	}
	switch header[4] {
	case kind + 1:
		return body, nil
	case lerror:
		return nil, unix.Errno(binary.LittleEndian.Uint32(body))
	}
	return nil, fmt.Errorf("type %d is the answer to %d", header[4], kind)
}

// Fid returns a number that hasn't been used.
func (c *Client) Fid() uint32 {
	c.next++
	return c.next
}

// Root attaches for a user.
func (c *Client) Root(uid uint32) (uint32, error) {
	f := c.Fid()
	_, err := c.Do(Attach, f, None, "", "", uid)
	return f, err
}

// Walk goes from a fid to another file.
func (c *Client) Walk(from uint32, names ...string) (uint32, error) {
	f := c.Fid()
	fields := []any{from, f, uint16(len(names))}
	for _, n := range names {
		fields = append(fields, n)
	}
	b, err := c.Do(Walk, fields...)
	if err == nil && int(binary.LittleEndian.Uint16(b)) < len(names) {
		err = unix.ENOENT // some of them
	}
	return f, err
}

// Open walks to a file and opens it.
func (c *Client) Open(from uint32, flags int, names ...string) (uint32, error) {
	f, err := c.Walk(from, names...)
	if err == nil {
		if _, err = c.Do(Lopen, f, uint32(flags)); err != nil {
			_ = c.Clunk(f)
		}
	}
	return f, err
}

// Create makes a file and opens it.
func (c *Client) Create(dir uint32, name string, flags int, mode, gid uint32) (uint32, error) {
	f, err := c.Walk(dir)
	if err == nil {
		if _, err = c.Do(Lcreate, f, name, uint32(flags), mode, gid); err != nil {
			_ = c.Clunk(f)
		}
	}
	return f, err
}

// Clunk ends a fid.
func (c *Client) Clunk(f uint32) error {
	_, err := c.Do(Clunk, f)
	return err
}

// Write writes at an offset.
func (c *Client) Write(f uint32, off uint64, data []byte) (int, error) {
	b, err := c.Do(Write, f, off, uint32(len(data)), data)
	if err != nil {
		return 0, err
	}
	return int(binary.LittleEndian.Uint32(b)), nil
}

// Read reads at most count bytes at an offset.
func (c *Client) Read(f uint32, off uint64, count uint32) ([]byte, error) {
	b, err := c.Do(Read, f, off, count)
	if err != nil {
		return nil, err
	}
	return b[4:], nil
}

// Attr is what Getattr tells.
type Attr struct {
	Mode, UID, GID            uint32
	Links, Device, Size       uint64
	Atime, AtimeNS, Mtime, NS uint64
}

// Stat asks for a file's attributes.
func (c *Client) Stat(f uint32) (a Attr, err error) {
	b, err := c.Do(Getattr, f, uint64(0x7ff))
	if err != nil {
		return a, err
	}
	u := binary.LittleEndian
	b = b[8+13:]
	a.Mode, a.UID, a.GID = u.Uint32(b), u.Uint32(b[4:]), u.Uint32(b[8:])
	for i, v := range []*uint64{&a.Links, &a.Device, &a.Size, nil, nil, &a.Atime, &a.AtimeNS, &a.Mtime, &a.NS} {
		if v != nil {
			*v = u.Uint64(b[12+8*i:])
		}
	}
	return a, nil
}

// Attributes to set.
const (
	SetMode = 0x1
	SetUID  = 0x2
	SetGID  = 0x4
	SetSize = 0x8
	Mtime   = 0x20
	MtimeTo = 0x100
)

// Set changes attributes. times are those of access and of modification, in seconds.
func (c *Client) Set(f, valid, mode, uid, gid uint32, size uint64, times ...uint64) error {
	times = slices.Concat(times, []uint64{0, 0})
	_, err := c.Do(Setattr, f, valid, mode, uid, gid, size, times[0], uint64(0), times[1], uint64(0))
	return err
}

// Names lists a directory, in parts of at most count bytes.
func (c *Client) Names(f uint32, count uint32) (names []string, err error) {
	for off := uint64(0); ; {
		b, err := c.Do(Readdir, f, off, count)
		if err != nil {
			return nil, err
		}
		b = b[4:]
		if len(b) == 0 {
			return names, nil
		}
		for len(b) > 0 {
			off = binary.LittleEndian.Uint64(b[13:])
			n := int(binary.LittleEndian.Uint16(b[22:]))
			names = append(names, string(b[24:24+n]))
			b = b[24+n:]
		}
	}
}
