package ninep

import (
	"encoding/binary"
	"errors"
	"math"

	"golang.org/x/sys/unix"
)

// Sizes, in bytes, of the protocol (https://9fans.github.io/plan9port/man/man9/intro.html and diod's protocol.md).
const (
	headerSize = 4 + 1 + 2
	qidSize    = 1 + 4 + 8
	// maxMessage is the largest message that the server agrees to, minMessage the smallest that holds any name and attribute.
	maxMessage = 512 << 10
	minMessage = 4 << 10
	// maxWalk is how many names a Twalk may have.
	maxWalk = 16
	// maxName is Linux' NAME_MAX, maxPath its PATH_MAX.
	maxName = 255
	maxPath = 4095
)

// Types of requests. The answer's is one more.
const (
	rlerror      = 7
	tstatfs      = 8
	tlopen       = 12
	tlcreate     = 14
	tsymlink     = 16
	tmknod       = 18
	treadlink    = 22
	tgetattr     = 24
	tsetattr     = 26
	txattrwalk   = 30
	txattrcreate = 32
	treaddir     = 40
	tfsync       = 50
	tlock        = 52
	tgetlock     = 54
	tlink        = 70
	tmkdir       = 72
	trenameat    = 74
	tunlinkat    = 76
	tversion     = 100
	tattach      = 104
	tflush       = 108
	twalk        = 110
	tread        = 116
	twrite       = 118
	tclunk       = 120
	tremove      = 122
)

// errMalformed ends a connection: the client doesn't speak the protocol.
var errMalformed = errors.New("malformed message")

// reader takes a request apart. After the first field that isn't there all are zero, and end reports it.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) next(n int) []byte {
	if r.bad || len(r.b) < n {
		r.bad = true
		return make([]byte, min(n, 8))
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) u8() uint8   { return r.next(1)[0] }
func (r *reader) u16() uint16 { return binary.LittleEndian.Uint16(r.next(2)) }
func (r *reader) u32() uint32 { return binary.LittleEndian.Uint32(r.next(4)) }
func (r *reader) u64() uint64 { return binary.LittleEndian.Uint64(r.next(8)) }

func (r *reader) string() string {
	n := int(r.u16())
	if r.bad || len(r.b) < n {
		r.bad = true
		return ""
	}
	return string(r.next(n))
}

// data is the rest, of which the client has said that it is n bytes.
func (r *reader) data(n uint32) []byte {
	if r.bad || uint64(len(r.b)) != uint64(n) {
		r.bad = true
		return nil
	}
	return r.next(int(n))
}

// end must be asked before anything is done with the fields.
func (r *reader) end() error {
	if r.bad || len(r.b) > 0 {
		return errMalformed
	}
	return nil
}

// writer makes an answer. Its buffer begins with the header.
type writer struct{ b []byte }

func (w *writer) u8(v uint8)   { w.b = append(w.b, v) }
func (w *writer) u16(v uint16) { w.b = binary.LittleEndian.AppendUint16(w.b, v) }
func (w *writer) u32(v uint32) { w.b = binary.LittleEndian.AppendUint32(w.b, v) }
func (w *writer) u64(v uint64) { w.b = binary.LittleEndian.AppendUint64(w.b, v) }

func (w *writer) string(s string) {
	w.u16(uint16(len(s)))
	w.b = append(w.b, s...)
}

func (w *writer) qid(q qid) {
	w.u8(q.kind)
	w.u32(0) // version: that of files isn't known
	w.u64(q.path)
}

// begin starts over with room for the header, finish fills that in.
func (w *writer) begin() { w.b = append(w.b[:0], make([]byte, headerSize)...) }

func (w *writer) finish(kind uint8, tag uint16) {
	binary.LittleEndian.PutUint32(w.b, uint32(len(w.b)))
	w.b[4] = kind
	binary.LittleEndian.PutUint16(w.b[5:], tag)
}

// qid is a file's identity.
type qid struct {
	kind uint8
	path uint64
}

// qidOf tells apart files of the several file systems that a tree may have, whose inode numbers overlap; those of the
// root's own file system stay what they are.
func (c *conn) qidOf(mode uint32, dev, ino uint64) qid {
	const spread = 0x9e3779b97f4a7c15 // 2^64 / golden ratio: near device numbers come to lie far apart
	q := qid{path: ino ^ (dev^c.rootDev)*spread}
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		q.kind = 0x80
	case unix.S_IFLNK:
		q.kind = 0x02
	}
	return q
}

// checkName refuses what isn't the name of one entry of a directory.
func checkName(s string) error {
	switch {
	case len(s) > maxName:
		return unix.ENAMETOOLONG
	case s == "" || s == "." || s == "..":
		return unix.EINVAL
	}
	for i := range len(s) {
		if s[i] == '/' || s[i] == 0 {
			return unix.EINVAL
		}
	}
	return nil
}

// offset is a position in a file, which Linux takes as a signed number.
func offset(v uint64) (int64, error) {
	if v > math.MaxInt64 {
		return 0, unix.EINVAL
	}
	return int64(v), nil
}

// again repeats a system call that a signal has interrupted; file systems in user space and on a network have such.
func again[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if err != unix.EINTR {
			return v, err
		}
	}
}
