package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/share"
	"github.com/cubesandbox/cube/shim/spec"
)

// share gives the container a file or directory of the host, which the helper of such shares serves.
func (c *container) share(t *testing.T, source string, readOnly bool) {
	t.Helper()
	c.serve(t, helper(t, source, readOnly), source, readOnly)
}

// serve has the container ask for what the server at the other end of a connection serves.
func (c *container) serve(t *testing.T, conn net.Conn, source string, readOnly bool) {
	t.Helper()
	st, id := c.m.open(t)
	_ = st.SetDeadline(time.Time{})
	request := &api.Share{Stream: id, ReadOnly: readOnly}
	if info, err := os.Stat(source); err == nil && info.Mode().IsRegular() {
		request.File = share.FileName
	}
	c.shares = append(c.shares, request)
	for _, way := range [][2]net.Conn{{st, conn}, {conn, st}} {
		go func() {
			_, _ = io.Copy(way[0], way[1])
			_, _ = st.Close(), conn.Close()
		}()
	}
}

// helper starts a helper for one share.
func helper(t *testing.T, source string, readOnly bool) net.Conn {
	t.Helper()
	host := *cfg
	host.RunDir = t.TempDir()
	var err error
	if host.BinDir, err = filepath.Abs("../../bin"); err != nil {
		t.Fatal(err)
	}
	s, err := share.Start(contextFor(t, 10*time.Second), share.Config{
		Host: &host, ID: "agent-test", Dir: t.TempDir(), Shares: []spec.Share{{Source: source, ReadOnly: readOnly}},
		Memory: 64 << 20, Record: func(share.Record) error { return nil }, Log: slog.Default(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s.Conns()[0]
}

func sha256Sum(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// build builds a program of the tests' for the guest.
func build(t *testing.T, source, binary string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-o", binary, source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func mount(destination, fstype, source string, options ...string) specs.Mount {
	return specs.Mount{Destination: destination, Type: fstype, Source: source, Options: options}
}

// A container sees small files that come with it, writable or not, and they are its own.
func TestFiles(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	for i, id := range []string{"files-a", "files-b"} {
		c := m.newContainer(t, id)
		c.files = []*api.File{{Content: []byte("hosts " + id + "\n"), Mode: 0o644}, {Content: []byte("secret\n"), Mode: 0o640}}
		s := containerSpec("sh", "-c", `
			cat /etc/hosts; stat -c '%a %u %g' /etc/hosts /etc/secret
			echo "$(echo x 2>&1 >/etc/hosts)" | grep -o 'Read-only'
			echo changed >/etc/secret && cat /etc/secret
			dd if=/dev/zero of=/etc/secret bs=1M count=8 2>&1 | grep -o 'No space'`)
		s.Mounts = append(s.Mounts, mount("/etc/hosts", "cube-file", "0", "ro", "nosuid"), mount("/etc/secret", "cube-file", "1"))
		c.run(t, s)
		if got := read(t, c.stdout); got != "hosts "+id+"\n644 0 0\n640 0 0\nRead-only\nchanged\nNo space\n" {
			t.Errorf("%d: %q, %q", i, got, read(t, c.stderr))
		}
		f.exit(t, id, "")
	}
}

// The pod's shared memory is seen by those who ask for it, and outlives each of them.
func TestSharedMemory(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	run := func(id, fstype, size, command string) string {
		t.Helper()
		c := m.newContainer(t, id)
		s := containerSpec("sh", "-c", command)
		for i := range s.Mounts {
			if m := &s.Mounts[i]; m.Destination == "/dev/shm" {
				m.Type = fstype
				m.Options = []string{"nosuid", "noexec", "nodev", "mode=1777", "size=" + size}
			}
		}
		c.run(t, s)
		said := read(t, c.stdout) + read(t, c.stderr)
		f.exit(t, id, "")
		return strings.TrimSpace(said)
	}
	if got := run("shm-a", "cube-shm", "3m", "stat -c %a /dev/shm; df -m /dev/shm | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2; echo x >/dev/shm/x"); got != "1777\n3" {
		t.Errorf("%q", got)
	}
	if got := run("shm-b", "cube-shm", "9m", "cat /dev/shm/x"); got != "x" {
		t.Errorf("%q", got)
	}
	if got := run("shm-c", "tmpfs", "9m", "ls /dev/shm"); got != "" {
		t.Errorf("a container with memory of its own sees %q", got)
	}
	c := m.newContainer(t, "shm-d")
	s := containerSpec("true")
	s.Mounts = append(s.Mounts, mount("/x", "cube-shm", "shm", "size=1,mode=0"))
	want(t, c.create(t, s), codes.InvalidArgument, "size")
}

// A directory of the host is the container's, both ways and at once; a file, or what is read-only, is no more than that.
func TestShares(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	dir, etc, locked := t.TempDir(), t.TempDir(), t.TempDir()
	for path, content := range map[string]string{
		dir + "/greeting": "hello\n", etc + "/only": "first\n", locked + "/kept": "kept\n",
	} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c := m.newContainer(t, "shares")
	c.share(t, dir, false)
	c.share(t, etc+"/only", false)
	c.share(t, locked, true)
	s := containerSpec("sh")
	s.Process.Capabilities.Effective, s.Process.Capabilities.Permitted = s.Process.Capabilities.Bounding, s.Process.Capabilities.Bounding
	s.Mounts = append(s.Mounts, mount("/data", "cube-share", "0", "nosuid"), mount("/etc/only", "cube-share", "1"),
		mount("/locked", "cube-share", "2", "ro"))
	c.run(t, s)
	ask := func(command string) string {
		t.Helper()
		if _, err := fmt.Fprintf(c.stdin, "(%s) 2>&1; echo .\n", command); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for {
			line := counted(t, c.stdout)
			if line == "." {
				return strings.Join(lines, "\n")
			}
			lines = append(lines, line)
		}
	}
	build(t, "./testdata/mapped", filepath.Join(dir, "mapped"))
	for _, tc := range []struct{ command, want string }{
		{"cat /data/greeting", "hello"},
		{"cat /etc/only; ls /etc", "first\nonly\npasswd"},
		{"cat /locked/kept", "kept"},
		{"echo x >/locked/kept", "sh: can't create /locked/kept: Read-only file system"},
		{"mkdir /data/d && echo inside >/data/d/f && chmod 600 /data/d/f && stat -c '%a %u %g' /data/d/f", "600 0 0"},
		{"echo more >>/data/greeting; cat /data/greeting", "hello\nmore"},
		{"/data/mapped /data/greeting HELLO; cat /data/greeting", "hello\nHELLO\nmore"},
		{"mv /data/greeting /data/d/moved && ls /data/d && mv /data/d/moved /data/greeting", "f\nmoved"},
	} {
		if got := ask(tc.command); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.command, got, tc.want)
		}
	}
	for path, content := range map[string]string{dir + "/d/f": "inside\n", dir + "/greeting": "HELLO\nmore\n", locked + "/kept": "kept\n"} {
		if b, err := os.ReadFile(path); string(b) != content || err != nil {
			t.Errorf("on the host %s: %q, %v", path, b, err)
		}
	}
	// What changes on the host is seen at once: contents, size, a file that comes and one that goes, also while they are open.
	ask("exec 7</data/greeting; exec 8</data")
	for i := range 3 {
		content := strings.Repeat(fmt.Sprint("host ", i, "\n"), 1000*i+1)
		if err := os.WriteFile(dir+"/greeting", []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprint("new-", i)
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if got := ask("cat /data/greeting | sha256sum | cut -c 1-8; stat -c %s /data/greeting; ls /data | grep -c new"); got !=
			fmt.Sprintf("%.8s\n%d\n1", sha256Sum(content), len(content)) {
			t.Errorf("%d: %q", i, got)
		}
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		if got := ask("cat /data/" + name); !strings.Contains(got, "No such file") {
			t.Errorf("%d: %q", i, got)
		}
	}
	_ = c.stdin.CloseWrite()
	f.exit(t, c.id, "")
	if err := m.remove(t, c.id); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dir + "/d/f"); string(b) != "inside\n" || err != nil {
		t.Errorf("on the host after the container's end: %q, %v", b, err)
	}
}

// Files of the host belong to whom they would belong to if the container ran there.
func TestShareUsers(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/secret", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := m.newContainer(t, "users")
	c.share(t, dir, false)
	s := containerSpec("sh", "-c", "echo x >/data/mine; mkdir /data/dir; cat /data/secret; stat -c '%u %g' /data/mine /data/dir")
	s.Process.User = specs.User{UID: 1000, GID: 1001}
	s.Mounts = append(s.Mounts, mount("/data", "cube-share", "0"))
	c.run(t, s)
	if got := read(t, c.stdout); got != "1000 1001\n1000 1001\n" {
		t.Errorf("%q", got)
	}
	if got := read(t, c.stderr); !strings.Contains(got, "Permission denied") {
		t.Errorf("%q", got)
	}
	f.exit(t, c.id, "")
	for _, name := range []string{"mine", "dir"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 1000 || st.Gid != 1001 {
			t.Errorf("on the host %s belongs to %d:%d", name, st.Uid, st.Gid)
		}
	}
}

// What a container asks for and can't have.
func TestVolumesRefused(t *testing.T) {
	m := sharedMachine(t)
	c := m.newContainer(t, "no-volumes")
	dir := t.TempDir()
	if err := os.Symlink("/etc/passwd", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	idle := func() net.Conn {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { _ = theirs.Close() })
		return ours
	}
	dead := func() net.Conn { // since it was asked something; one that was never there has no stream
		ours, theirs := net.Pipe()
		go func() {
			_, _ = theirs.Read(make([]byte, 1))
			_ = theirs.Close()
		}()
		return ours
	}
	for name, tc := range map[string]struct {
		prepare func()
		code    codes.Code
		words   string
	}{
		"many files":  {func() { c.files = make([]*api.File, 18) }, codes.InvalidArgument, "18 files"},
		"large file":  {func() { c.files = []*api.File{{Content: make([]byte, 64<<10+1)}} }, codes.InvalidArgument, "65537 bytes"},
		"mode":        {func() { c.files = []*api.File{{Mode: 0o4755}} }, codes.InvalidArgument, "04755"},
		"no file":     {func() { c.share(t, dir, false); c.shares[0].File = "absent" }, codes.Unknown, "no such file"},
		"a link":      {func() { c.share(t, dir, false); c.shares[0].File = "link" }, codes.Unknown, "link"},
		"a path":      {func() { c.share(t, dir, false); c.shares[0].File = "../x" }, codes.InvalidArgument, "../x"},
		"no stream":   {func() { c.shares = []*api.Share{{Stream: 1 << 30}} }, codes.InvalidArgument, "no such stream"},
		"dead server": {func() { c.serve(t, dead(), "", false) }, codes.Unknown, "share 0"},
		"many shares": {func() {
			for range 65 {
				c.serve(t, idle(), "", false)
			}
		}, codes.InvalidArgument, "65 shares"},
	} {
		c.files, c.shares = nil, nil
		tc.prepare()
		err := c.create(t, containerSpec("true"))
		t.Logf("%s: %v", name, err)
		want(t, err, tc.code, tc.words)
	}
}

// A server that is gone or says nothing gives a container errors, and doesn't keep it, or the machine, from ending.
func TestDeadServers(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	dir := t.TempDir()
	for _, silent := range []bool{false, true} {
		c := m.newContainer(t, fmt.Sprint("dead-", silent))
		server := &unreliable{Conn: helper(t, dir, false)}
		c.serve(t, server, dir, false)
		s := containerSpec("sh", "-c", "echo up; while echo x >/data/x; do :; done; cat /data/x")
		s.Mounts = append(s.Mounts, mount("/data", "cube-share", "0"))
		c.run(t, s)
		counted(t, c.stdout)
		if silent {
			server.silent.Store(true)
			c.kill(t, f)
		} else {
			_ = server.Close()
			t.Logf("the container is told %q", read(t, c.stderr))
			if code := f.exit(t, c.id, ""); code != 1 {
				t.Errorf("status %d", code)
			}
		}
		if err := m.remove(t, c.id); err != nil {
			t.Fatal(err)
		}
	}
}

// unreliable is a connection to a server whose answers may get lost.
type unreliable struct {
	net.Conn
	silent atomic.Bool
}

func (u *unreliable) Read(b []byte) (int, error) {
	for {
		n, err := u.Conn.Read(b)
		if err != nil || !u.silent.Load() {
			return n, err
		}
	}
}
