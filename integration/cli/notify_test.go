package cli

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNotify: who runs `cube up` as a service of Type=notify hears what is waited for, that it is ready, and that it stops; and of
// none of its daemons anything.
func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	hears := func(want string) (before []string) {
		t.Helper()
		if err := l.SetReadDeadline(time.Now().Add(s.Config.Timeout(2 * time.Minute))); err != nil {
			t.Fatal(err)
		}
		for b := make([]byte, 4096); ; {
			n, err := l.Read(b)
			if err != nil {
				t.Fatalf("%s: %v after %q", want, err, before)
			}
			if strings.HasPrefix(string(b[:n]), want) {
				return before
			}
			before = append(before, string(b[:n]))
		}
	}
	kill(t, up(t), unix.SIGTERM)
	cmd := s.Command("cube", "up")
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		ok(t, "up", "-d")
	}()
	before := hears("READY=1\nSTATUS=ready")
	for _, said := range before {
		if !strings.HasPrefix(said, "STATUS=waiting for ") {
			t.Errorf("before it is ready it says %q", said)
		}
	}
	if len(before) < 5 {
		t.Errorf("before it is ready it says %q", before)
	}
	if code, _ := get(t, "/readyz"); code != 200 {
		t.Errorf("it says that it is ready, and /readyz %d", code)
	}
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if before := hears("STOPPING=1"); len(before) > 0 {
		t.Errorf("before it stops it says %q", before)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
