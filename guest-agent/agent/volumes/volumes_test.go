package volumes

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting takes root")
	}
}

// unmounted checks that nothing is mounted below dir, and that it is empty.
func unmounted(t *testing.T, dir string) {
	t.Helper()
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil || len(left) != 0 {
		t.Errorf("mounts left: %v, %v", left, err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("files left: %v, %v", names, err)
	}
}

func TestCheck(t *testing.T) {
	good := make([]*api.File, maxFiles)
	for i := range good {
		good[i] = &api.File{Content: make([]byte, maxFileSize), Mode: 0o777}
	}
	if err := check(good, make([]Share, maxShares)); err != nil {
		t.Error(err)
	}
	for want, err := range map[string]error{
		"18 files":    check(make([]*api.File, maxFiles+1), nil),
		"65537 bytes": check([]*api.File{{Content: make([]byte, maxFileSize+1)}}, nil),
		"01000":       check([]*api.File{{Mode: 0o1000}}, nil),
		"65 shares":   check(nil, make([]Share, maxShares+1)),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	for _, name := range []string{"/", "/x", "..", ".", "a/b", "a/", "../a"} {
		if err := check(nil, []Share{{File: name}}); err == nil {
			t.Errorf("%q is the name of a file", name)
		}
	}
}

func TestFiles(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	v, err := Prepare(t.Context(), dir, []*api.File{{Content: []byte("a"), Mode: 0o644}, {Mode: 0o600}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		content string
		mode    os.FileMode
	}{{"a", 0o644}, {"", 0o600}} {
		b, err := os.ReadFile(v.Files[i])
		if err != nil || string(b) != want.content {
			t.Errorf("%s: %q, %v", v.Files[i], b, err)
		}
		if info, err := os.Stat(v.Files[i]); err != nil || info.Mode() != want.mode {
			t.Errorf("%v, %v", info, err)
		}
	}
	for range 2 {
		if err := v.Release(); err != nil {
			t.Error(err)
		}
	}
	unmounted(t, dir)
}

// A server that says nothing doesn't hold up a creation whose time is up, nor does anything stay of it.
func TestSilentServer(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	ours, theirs := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, theirs) }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	files := []*api.File{{Content: []byte("a"), Mode: 0o600}}
	if _, err := Prepare(ctx, dir, files, []Share{{Stream: ours}}); err == nil {
		t.Error("mounted")
	}
	if _, err := ours.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the stream is still open: %v", err)
	}
	unmounted(t, dir)
}

// Closing either end of a connection closes the other.
func TestPumps(t *testing.T) {
	for _, name := range []string{"kernel", "server"} {
		stream, server := net.Pipe()
		socket, kernel := net.Pipe()
		m := &mount{stream: stream, socket: socket}
		m.pump()
		ends := map[string]net.Conn{"kernel": kernel, "server": server}
		go func() { _, _ = kernel.Write([]byte("request")) }()
		if _, err := io.ReadFull(server, make([]byte, len("request"))); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = server.Write([]byte("answer")) }()
		if _, err := io.ReadFull(kernel, make([]byte, len("answer"))); err != nil {
			t.Fatal(err)
		}
		if m.heard.Load() == 0 {
			t.Error("the answer hasn't been noticed")
		}
		_ = ends[name].Close()
		m.pumps.Wait()
		delete(ends, name)
		for other, c := range ends {
			if _, err := c.Read(make([]byte, 1)); err == nil {
				t.Errorf("%s's end is still open", other)
			}
		}
	}
}

func TestShm(t *testing.T) {
	needRoot(t)
	s := &Shm{Dir: filepath.Join(t.TempDir(), "shm")}
	for _, size := range []string{"x", "-1", "1,mode=0", "1 "} {
		if _, err := s.Path(size); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", size, err)
		}
	}
	defer func() { _ = unix.Unmount(s.Dir, 0) }()
	for _, size := range []string{"1m", "", "5k"} {
		if at, err := s.Path(size); at != s.Dir || err != nil {
			t.Fatalf("%q: %s, %v", size, at, err)
		}
	}
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(s.Dir))
	if err != nil || len(mounts) != 1 || !strings.Contains(mounts[0].VFSOptions, "size=1024k") {
		t.Errorf("%v, %v", mounts, err)
	}
}
