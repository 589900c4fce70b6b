package crun

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/reap"
)

func TestSealedCopy(t *testing.T) {
	path, err := exec.LookPath("true")
	if err != nil {
		t.Fatal(err)
	}
	f, err := seal(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<30)); !bytes.Equal(got, want) || err != nil {
		t.Errorf("the copy differs (%d of %d bytes), %v", len(got), len(want), err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("the copy can be written")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("the copy can be cut")
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); err == nil {
		t.Error("the seals can be changed")
	}
	if _, err := seal("/nonexistent"); err == nil {
		t.Error("sealed what isn't there")
	}
}

// A program that fails is an error with what it has logged; crun's command line isn't of interest here.
func TestFailure(t *testing.T) {
	path, err := exec.LookPath("false")
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(path, reap.New())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err = r.Create(ctx, "x", dir, dir, Process{})
	if failed, ok := err.(*Error); !ok || failed.Op != "create" || failed.Error() != "crun ended with status 1 and said nothing" {
		t.Errorf("got %v", err)
	}
	if err := r.Delete(ctx, "no-such-container", dir); err != nil {
		t.Errorf("delete of nothing: %v", err)
	}
	if left, err := os.ReadDir(dir); len(left) != 0 || err != nil {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestLastError(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	for content, want := range map[string]string{
		`{"msg":"executable file ` + "`x`" + ` not found in $PATH: No such file or directory","level":"error"}`: "executable file `x` not found in $PATH: No such file or directory",
		`{"msg":"first","level":"error"}` + "\n" + `{"msg":"second\nline","level":"error"}` + "\n":              "second line",
		`{"msg":"cause","level":"error"}` + "\n" + `{"msg":"beside","level":"warning"}` + "\nno JSON\n":         "cause",
		"": "crun ended with status 7 and said nothing",
	} {
		if err := os.WriteFile(log, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := lastError(log, 7); got != want {
			t.Errorf("%q: %q, want %q", content, got, want)
		}
	}
}

func TestNoCommand(t *testing.T) {
	for message, want := range map[string]bool{
		"executable file `x` not found in $PATH: No such file or directory": true,
		"open executable: Permission denied":                                true,
		"chdir `/x`: No such file or directory":                             false,
	} {
		if got := (&Error{Message: message}).NoCommand(); got != want {
			t.Errorf("%q: %v", message, got)
		}
	}
}

func TestConsole(t *testing.T) {
	c, err := listenConsole(filepath.Join(t.TempDir(), "console"))
	if err != nil {
		t.Fatal(err)
	}
	send := func(fds ...int) {
		t.Helper()
		conn, err := net.Dial("unix", c.path)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var rights []byte
		if len(fds) > 0 {
			rights = unix.UnixRights(fds...)
		}
		if _, _, err := conn.(*net.UnixConn).WriteMsgUnix([]byte("/dev/ptmx"), rights, nil); err != nil {
			t.Fatal(err)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	send(int(w.Fd()))
	_ = w.Close()
	got, err := c.receive()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := got.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	_ = got.Close()
	if b, err := io.ReadAll(r); string(b) != "x" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	send()
	if _, err := c.receive(); err == nil {
		t.Error("received nothing as a terminal")
	}
	c.close()
	if _, err := os.Stat(c.path); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}
