package share_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/share"
	"github.com/cubesandbox/cube/shim/share/internal/client"
	"github.com/cubesandbox/cube/shim/share/ninep"
	"github.com/cubesandbox/cube/shim/spec"
)

// maxResident bounds the memory of a helper with two shares, whatever its guest does.
const maxResident = 48 << 20

// lives checks that the helper serves another connection, and its memory.
func lives(t *testing.T, s *share.Server, conn net.Conn) {
	t.Helper()
	if _, root := connect(t, conn, 0); root == 0 {
		t.Error("no root")
	}
	kib, err := strconv.Atoi(strings.TrimSuffix(status(t, s.PID())["VmHWM"], " kB"))
	if err != nil || kib<<10 > maxResident {
		t.Errorf("the helper has had %d KiB: %v", kib, err)
	}
}

// Names that lead elsewhere, and files that are elsewhere.
func TestEscape(t *testing.T) {
	dir, c, root := serve(t)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	if err := errors.Join(os.Mkdir(outside, 0o700), os.WriteFile(filepath.Join(outside, "secret"), nil, 0o600),
		os.Symlink(outside, filepath.Join(dir, "link")), os.Symlink("/", filepath.Join(dir, "slash")), os.Mkdir(filepath.Join(dir, "d"), 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"..", ".", "", "/", "d/..", "../outside", "/etc", "a\x00b"} {
		for what, err := range map[string]error{
			"walk":    second(c.Walk(root, bad)),
			"create":  second(c.Create(root, bad, unix.O_RDWR, 0o600, 0)),
			"mkdir":   second(c.Do(client.Mkdir, root, bad, uint32(0o700), uint32(0))),
			"mknod":   second(c.Do(client.Mknod, root, bad, uint32(unix.S_IFREG|0o600), uint32(0), uint32(0), uint32(0))),
			"symlink": second(c.Do(client.Symlink, root, bad, "x", uint32(0))),
			"unlink":  second(c.Do(client.Unlinkat, root, bad, uint32(0))),
			"rename":  second(c.Do(client.Renameat, root, "d", root, bad)),
			"rename2": second(c.Do(client.Renameat, root, bad, root, "x")),
			"link":    second(c.Do(client.Link, root, root, bad)),
		} {
			wants(t, what+" "+strconv.Quote(bad), err, unix.EINVAL)
		}
	}
	wants(t, "long name", second(c.Walk(root, strings.Repeat("x", 256))), unix.ENAMETOOLONG)
	wants(t, "through a link", second(c.Walk(root, "link", "secret")), unix.ENOENT)
	wants(t, "through a link to /", second(c.Walk(root, "slash", "proc")), unix.ENOENT)
	wants(t, "open a link", second(c.Open(root, unix.O_RDWR, "link")), unix.ELOOP)
	wants(t, "create over a link", second(c.Create(root, "link", unix.O_RDWR, 0o600, 0)), unix.ELOOP)
	link := must(c.Walk(root, "link"))(t)
	wants(t, "walk on from a link", second(c.Walk(link, "secret")), unix.ENOTDIR)
	wants(t, "create in a link", second(c.Create(link, "x", unix.O_RDWR, 0o600, 0)), unix.ENOTDIR)
	wants(t, "another tree", second(c.Do(client.Attach, c.Fid(), client.None, "", "/proc", uint32(0))), unix.ENOENT)
	d := must(c.Walk(root, "d"))(t)
	wants(t, "back from a directory", second(c.Walk(d, "..")), unix.EINVAL)

	// A directory that the host moves out of the share is still the one that was walked to, and the way ends there.
	if err := os.Rename(filepath.Join(dir, "d"), filepath.Join(outside, "d")); err != nil {
		t.Fatal(err)
	}
	wants(t, "back from outside", second(c.Walk(d, "..", "secret")), unix.EINVAL)
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 2 {
		t.Errorf("outside: %v, %v", entries, err)
	}
}

func second[T any](_ T, err error) error { return err }

// A directory that becomes a link and a directory again, as fast as it can, while the guest walks through it.
func TestWalkRace(t *testing.T) {
	dir, c, root := serve(t)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	if err := errors.Join(os.Mkdir(outside, 0o755), os.WriteFile(filepath.Join(outside, "f"), []byte("outside"), 0o644), os.Mkdir(filepath.Join(dir, "d"), 0o755),
		os.WriteFile(filepath.Join(dir, "d", "f"), []byte("inside"), 0o644), os.Symlink(outside, filepath.Join(dir, "l"))); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	done := make(chan error)
	go func() {
		for !stop.Load() {
			if err := unix.Renameat2(unix.AT_FDCWD, filepath.Join(dir, "d"), unix.AT_FDCWD, filepath.Join(dir, "l"), unix.RENAME_EXCHANGE); err != nil {
				done <- err
				return
			}
			runtime.Gosched()
		}
		done <- nil
	}()
	inside, refused := 0, 0
	deadline := time.Now().Add(30 * time.Second)
	for n := 0; (n < 2000 || inside == 0 || refused == 0) && time.Now().Before(deadline); n++ {
		f, err := c.Open(root, unix.O_RDONLY, "d", "f")
		if err != nil {
			refused++
			continue
		}
		inside++
		if b, err := c.Read(f, 0, 100); err != nil || string(b) != "inside" {
			t.Fatalf("read %q, %v", b, err)
		}
		if err := c.Clunk(f); err != nil {
			t.Fatal(err)
		}
	}
	stop.Store(true)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if inside == 0 || refused == 0 {
		t.Errorf("no race: %d inside, %d refused", inside, refused)
	}
}

// Devices, fifos and sockets are neither made nor opened; those that are there are names, which may be moved and removed.
func TestSpecialFiles(t *testing.T) {
	dir, c, root := serve(t)
	for name, mode := range map[string]uint32{"char": unix.S_IFCHR, "block": unix.S_IFBLK, "fifo": unix.S_IFIFO, "socket": unix.S_IFSOCK, "dir": unix.S_IFDIR, "link": unix.S_IFLNK} {
		wants(t, "make a "+name, second(c.Do(client.Mknod, root, name, mode|0o600, uint32(1), uint32(3), uint32(0))), unix.EPERM)
		if name == "dir" || name == "link" {
			continue
		}
		if err := unix.Mknod(filepath.Join(dir, name), mode|0o600, int(unix.Mkdev(1, 3))); err != nil {
			t.Logf("mknod: %v", err) // not everywhere may root make devices
			continue
		}
		for _, flags := range []int{unix.O_RDONLY, unix.O_WRONLY, unix.O_RDWR, unix.O_RDONLY | unix.O_TRUNC} {
			wants(t, "open a "+name, second(c.Open(root, flags, name)), unix.EPERM)
			wants(t, "create a "+name, second(c.Create(root, name, flags, 0o600, 0)), unix.EPERM)
		}
		f := must(c.Walk(root, name))(t)
		wants(t, "truncate a "+name, c.Set(f, client.SetSize, 0, 0, 0, 0), unix.EPERM)
		if a, err := c.Stat(f); err != nil || a.Mode != mode|0o600 || a.Device != 0 {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
		must(c.Do(client.Renameat, root, name, root, "x"))(t)
		must(c.Do(client.Unlinkat, root, "x", uint32(0)))(t)
	}
}

// A client that hoards fids and attributes gets no more at some point, and what it has goes with its connection.
func TestHoarder(t *testing.T) {
	dir := t.TempDir()
	s := start(t, spec.Share{Source: dir}, spec.Share{Source: dir})
	c, root := connect(t, s.Conns()[0], 0)
	must(c.Create(root, "f", unix.O_RDWR, 0o600, 0))(t)
	opened := 0
	var err error
	for err == nil {
		if _, err = c.Open(root, unix.O_RDONLY, "f"); err == nil {
			opened++
		}
	}
	wants(t, "another fid", err, unix.EMFILE)
	if opened < 4000 || opened > ninep.MaxFIDs {
		t.Errorf("%d files", opened)
	}
	_ = s.Conns()[0].Close()
	deadline := time.Now().Add(30 * time.Second)
	c, root = connect(t, s.Conns()[1], 0)
	for {
		if _, err = c.Open(root, unix.O_RDONLY, "f"); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Errorf("after the hoarder's end: %v", err)
	}
	n := 0
	for err = nil; err == nil; n++ {
		var f uint32
		if f, err = c.Walk(root, "f"); err == nil {
			_, err = c.Do(client.XattrCreate, f, "user.x", uint64(64<<10), uint32(0))
		}
	}
	wants(t, "another attribute", err, unix.EMFILE)
	if n > 20 {
		t.Errorf("%d attributes", n)
	}
	if _, err := c.Stat(root); err != nil {
		t.Error(err)
	}
}

// What is no message ends the connection, and no other.
func TestGarbage(t *testing.T) {
	header := func(size uint32, kind uint8) []byte {
		b := binary.LittleEndian.AppendUint32(nil, size)
		return append(b, kind, 0, 0)
	}
	version := client.Message(client.Version, uint32(1<<20), "9P2000.L")
	after := func(b []byte) []byte { return append(append([]byte{}, version...), b...) }
	for name, tc := range map[string]struct {
		say []byte
		end bool // the client closes its side after that
	}{
		"a huge message":      {say: after(header(1<<32-1, client.Write))},
		"one byte too much":   {say: after(header(512<<10+1, client.Write))},
		"too large at first":  {say: header(8<<10, client.Version)},
		"no header":           {say: after(header(6, client.Walk))},
		"size 0":              {say: make([]byte, 100)},
		"text":                {say: []byte("GET / HTTP/1.1\r\n\r\n")},
		"no version":          {say: client.Message(client.Attach, uint32(0), client.None, "", "", uint32(0))},
		"small messages":      {say: client.Message(client.Version, uint32(100), "9P2000.L")},
		"a field too few":     {say: after(client.Message(client.Attach, uint32(0), client.None, "", ""))},
		"a field too many":    {say: after(client.Message(client.Clunk, uint32(0), uint32(0)))},
		"a string's end":      {say: after(client.Message(client.Attach, uint32(0), client.None, uint16(60000)))},
		"data's end":          {say: after(client.Message(client.Write, uint32(0), uint64(0), uint32(1<<31), "x"))},
		"too many names":      {say: after(client.Message(client.Walk, uint32(0), uint32(1), uint16(17), strings.Repeat("\x01\x00x", 17)))},
		"names that are none": {say: after(client.Message(client.Walk, uint32(0), uint32(1), uint16(16)))},
		"the end in a header": {say: after([]byte{1, 2}), end: true},
		"the end in a body":   {say: after(header(1000, client.Walk)), end: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, spec.Share{Source: t.TempDir()}, spec.Share{Source: t.TempDir()})
			conn := s.Conns()[0].(*net.UnixConn)
			if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(tc.say); err != nil {
				t.Fatal(err)
			}
			if tc.end {
				if err := conn.CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the connection goes on: %v", err)
			}
			lives(t, s, s.Conns()[1])
		})
	}
}

// A client that asks for much and reads no answer waits for itself.
func TestNeverReads(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, spec.Share{Source: dir}, spec.Share{Source: dir})
	conn := s.Conns()[0]
	c, root := connect(t, conn, 0)
	f := must(c.Open(root, unix.O_RDONLY, "f"))(t)
	ask := client.Message(client.Read, f, uint64(0), uint32(1<<30))
	if err := conn.SetWriteDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	var err error
	n := 0
	for ; err == nil && n < 1e6; n++ {
		_, err = conn.Write(ask)
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d requests: %v", n, err)
	}
	lives(t, s, s.Conns()[1])
}

// Large messages on all connections at a time stay within the helper's memory.
func TestLargeMessages(t *testing.T) {
	dir := t.TempDir()
	s := start(t, spec.Share{Source: dir}, spec.Share{Source: dir})
	done := make(chan error, 1)
	work := func(c *client.Client, root uint32, name string) error {
		f, err := c.Create(root, name, unix.O_RDWR, 0o600, 0)
		if err != nil {
			return err
		}
		data := make([]byte, c.MSize-23)
		for i := range 64 {
			off := uint64(i%8) * uint64(len(data))
			if n, err := c.Write(f, off, data); err != nil || n != len(data) {
				return errors.Join(err, errors.New("short write"))
			}
			if b, err := c.Read(f, off, 1<<30); err != nil || len(b) < len(data) {
				return errors.Join(err, errors.New("short read"))
			}
		}
		return nil
	}
	c, root := connect(t, s.Conns()[1], 0)
	go func() { done <- work(c, root, "b") }()
	c2, root2 := connect(t, s.Conns()[0], 0)
	if err := errors.Join(work(c2, root2, "a"), <-done); err != nil {
		t.Error(err)
	}
	if c2.MSize != 512<<10 {
		t.Errorf("messages of %d bytes", c2.MSize)
	}
	lives(t, s, s.Conns()[1])
}
