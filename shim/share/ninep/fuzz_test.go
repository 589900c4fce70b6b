package ninep

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/share/internal/client"
)

// FuzzServe has the server answer whatever comes after a good beginning. It must neither panic nor keep a descriptor, send
// nothing that is no answer, and leave alone what is beside its directory.
func FuzzServe(f *testing.F) {
	m := client.Message
	join := func(messages ...[]byte) []byte { return bytes.Join(messages, nil) }
	make1 := join(m(client.Walk, uint32(0), uint32(1), uint16(0)), m(client.Lcreate, uint32(1), "f", uint32(2), uint32(0o644), uint32(0)))
	for _, seed := range [][]byte{
		nil,
		join(make1, m(client.Write, uint32(1), uint64(0), uint32(5), []byte("hello")), m(client.Read, uint32(1), uint64(1), uint32(100)), m(client.Clunk, uint32(1))),
		join(m(client.Mkdir, uint32(0), "d", uint32(0o755), uint32(0)), m(client.Walk, uint32(0), uint32(1), uint16(1), "d"), m(client.Lopen, uint32(1), uint32(0)),
			m(client.Readdir, uint32(1), uint64(0), uint32(1000)), m(client.Unlinkat, uint32(0), "d", uint32(0x200))),
		join(m(client.Symlink, uint32(0), "s", "../beside", uint32(0)), m(client.Walk, uint32(0), uint32(1), uint16(1), "s"), m(client.Readlink, uint32(1)),
			m(client.Link, uint32(0), uint32(1), "l"), m(client.Renameat, uint32(0), "l", uint32(0), "m")),
		join(make1, m(client.Setattr, uint32(1), uint32(0x1ff), uint32(0o600), uint32(1), uint32(1), uint64(9), uint64(1), uint64(2), uint64(3), uint64(4)), m(client.Getattr, uint32(1), uint64(0x7ff))),
		join(make1, m(client.Walk, uint32(0), uint32(2), uint16(1), "f"), m(client.XattrCreate, uint32(2), "user.a", uint64(1), uint32(0)), m(client.Write, uint32(2), uint64(0), uint32(1), []byte("v")),
			m(client.Clunk, uint32(2)), m(client.XattrWalk, uint32(1), uint32(3), ""), m(client.Read, uint32(3), uint64(0), uint32(100))),
		join(make1, m(client.Lock, uint32(1), uint8(1), uint32(0), uint64(0), uint64(0), uint32(1), "c"), m(client.Getlock, uint32(1), uint8(1), uint64(0), uint64(0), uint32(1), "c"), m(client.Fsync, uint32(1), uint32(1))),
		join(m(client.Mknod, uint32(0), "n", uint32(unix.S_IFREG|0o600), uint32(0), uint32(0), uint32(0)), m(client.Statfs, uint32(0)), m(client.Flush, uint16(1)), m(client.Remove, uint32(0))),
		join(m(client.Walk, uint32(0), uint32(0), uint16(2), "..", "beside"), m(client.Version, uint32(8192), "9P2000.u"), m(client.Attach, uint32(7), ^uint32(0), "", "", uint32(1))),
	} {
		f.Add(seed)
	}
	dir := f.TempDir()
	beside, shared := filepath.Join(dir, "beside"), filepath.Join(dir, "shared")
	if err := errors.Join(os.Mkdir(beside, 0o700), os.WriteFile(filepath.Join(beside, "f"), []byte("beside"), 0o600)); err != nil {
		f.Fatal(err)
	}
	begin := join(m(client.Version, uint32(64<<10), "9P2000.L"), m(client.Attach, uint32(0), ^uint32(0), "", "", uint32(os.Getuid())))
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.Mkdir(shared, 0o700); err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(shared)
		root, err := unix.Open(shared, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(root)
		before := descriptors(t)
		var s Server
		stream := &stream{Reader: io.MultiReader(bytes.NewReader(begin), bytes.NewReader(data)), t: t}
		err = s.Serve(stream, root)
		if stream.answers < 2 {
			t.Fatalf("%d answers: %v", stream.answers, err)
		}
		if n := s.fids.Load(); n != 0 || descriptors(t) != before {
			t.Errorf("%d fids are left, %d descriptors instead of %d", n, descriptors(t), before)
		}
		if b, err := os.ReadFile(filepath.Join(beside, "f")); err != nil || string(b) != "beside" {
			t.Fatalf("what is beside: %q, %v", b, err)
		}
		for _, d := range []string{dir, beside} {
			if entries, err := os.ReadDir(d); err != nil || len(entries) > 2 {
				t.Fatalf("%s has %v, %v", d, entries, err)
			}
		}
	})
}

// stream checks the answers.
type stream struct {
	io.Reader
	t       *testing.T
	answers int
}

func (s *stream) Write(b []byte) (int, error) {
	s.answers++
	if len(b) < headerSize || len(b) > maxMessage || int(binary.LittleEndian.Uint32(b)) != len(b) || b[4]%2 == 0 {
		s.t.Errorf("an answer of %d bytes: %.20x", len(b), b)
	}
	return len(b), nil
}

// descriptors counts the open ones.
func descriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
