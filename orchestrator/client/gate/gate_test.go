package gate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/crypto/ssh"

	"github.com/cubesandbox/cube/guest-agent/envd"
	"github.com/cubesandbox/cube/orchestrator/client"
)

// here is this machine in a sandbox's place: a real envd, and ports that are dialled without a proxy.
type here struct{ *client.Guest }

func (h here) Dial(ctx context.Context, port uint16) (client.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// startEnvd runs an envd for all tests.
var startEnvd = sync.OnceValues(func() (address string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	address = l.Addr().String()
	l.Close()
	go func() { _ = envd.Run(context.Background(), envd.Config{Address: address, User: "root"}) }()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get("http://" + address + "/health")
		if err == nil {
			resp.Body.Close()
			return address, nil
		}
		if time.Now().After(end) {
			return "", err
		}
	}
})

// enter has ssh's client talk to a gate, as a user.
func enter(t *testing.T, user string) *ssh.Client {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: envd runs commands as users, which takes root")
	}
	address, err := startEnvd()
	if err != nil {
		t.Fatal(err)
	}
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"sandboxID":"iabc","state":"running"}`)
	}))
	t.Cleanup(api.Close)
	c, err := client.New(client.Options{API: api.URL, Key: "key", Sandbox: "http://" + address})
	if err != nil {
		t.Fatal(err)
	}
	guest, err := c.Enter(t.Context(), "iabc")
	if err != nil {
		t.Fatal(err)
	}
	key, knownHosts, err := HostKey(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if line, err := os.ReadFile(knownHosts); err != nil || !strings.HasPrefix(string(line), HostAlias+" ssh-ed25519 ") {
		t.Errorf("%s, %v", line, err)
	}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "pipe"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), theirs, key, here{guest}) }()
	conn, channels, requests, err := ssh.NewClientConn(ours, "iabc", &ssh.ClientConfig{User: user, HostKeyCallback: ssh.FixedHostKey(key.PublicKey())})
	if err != nil {
		t.Fatal(err)
	}
	s := ssh.NewClient(conn, channels, requests)
	t.Cleanup(func() {
		s.Close()
		select {
		case err := <-served:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the gate stays when its client has gone")
		}
	})
	return s
}

func newSession(t *testing.T, c *ssh.Client) *ssh.Session {
	t.Helper()
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// code is what a process ended with.
func code(err error) int {
	var exit *ssh.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitStatus()
	}
	return -1
}

func TestCommand(t *testing.T) {
	c := enter(t, DefaultUser)
	s := newSession(t, c)
	var out, errs bytes.Buffer
	s.Stdin, s.Stdout, s.Stderr = strings.NewReader(strings.Repeat("input\n", 20000)), &out, &errs
	if err := s.Setenv("WORD", "a b"); err != nil {
		t.Error(err)
	}
	err := s.Run(`wc -c; echo "$WORD" >&2; id -un; exit 7`)
	if code(err) != 7 || out.String() != "120000\nroot\n" || errs.String() != "a b\n" {
		t.Errorf("%q %q %v", out.String(), errs.String(), err)
	}
	var exit *ssh.ExitError
	if err := newSession(t, c).Run("kill -SEGV $$"); !errors.As(err, &exit) || exit.Signal() != "SEGV" {
		t.Errorf("by a signal: %v", err)
	}
	s = newSession(t, c)
	said, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("echo here; exec sleep 600"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(said, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if err := s.Signal(ssh.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); !errors.As(err, &exit) || exit.Signal() != "TERM" {
		t.Errorf("by a signal of ours: %v", err)
	}
}

func TestTerminal(t *testing.T) {
	s := newSession(t, enter(t, "root"))
	if err := s.RequestPty("xterm", 24, 80, nil); err != nil {
		t.Fatal(err)
	}
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Shell(); err != nil {
		t.Fatal(err)
	}
	seen := ""
	until := func(words string) {
		t.Helper()
		buf := make([]byte, 1024)
		for !strings.Contains(seen, words) {
			n, err := out.Read(buf)
			if err != nil {
				t.Fatalf("%v after %q", err, seen)
			}
			seen += string(buf[:n])
		}
		seen = ""
	}
	fmt.Fprint(in, "stty size; echo $TERM; tty | cut -c1-8\n")
	until("24 80\r\nxterm\r\n/dev/pts")
	if err := s.WindowChange(50, 132); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(in, "bash -c 'trap \"echo interrup\"\"ted; exit\" INT; stty size; while :; do sleep .1; done'\n")
	until("50 132\r\n")
	fmt.Fprint(in, "\x03")
	until("interrupted\r\n")
	fmt.Fprint(in, "exit 3\n")
	go func() { _, _ = io.Copy(io.Discard, out) }()
	if err := s.Wait(); code(err) != 3 {
		t.Errorf("its end: %v", err)
	}
}

// TestNobodyThere: what a client leaves running doesn't stay.
func TestNobodyThere(t *testing.T) {
	for name, terminal := range map[string]bool{"command": false, "terminal": true} {
		t.Run(name, func(t *testing.T) {
			c := enter(t, DefaultUser)
			s := newSession(t, c)
			if terminal {
				if err := s.RequestPty("xterm", 24, 80, nil); err != nil {
					t.Fatal(err)
				}
			}
			out, err := s.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Start("echo $$; exec sleep 600"); err != nil {
				t.Fatal(err)
			}
			var pid int
			if _, err := fmt.Fscan(out, &pid); err != nil {
				t.Fatal(err)
			}
			c.Close()
			for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
					return
				}
				if time.Now().After(end) {
					t.Fatal("it still runs")
				}
			}
		})
	}
}

func TestNoSuchUser(t *testing.T) {
	s := newSession(t, enter(t, "nobody-of-that-name"))
	var errs bytes.Buffer
	s.Stderr = &errs
	if err := s.Run("true"); code(err) != codeLost || !strings.Contains(errs.String(), "there is no user") {
		t.Errorf("%q, %v", errs.String(), err)
	}
}

func TestForward(t *testing.T) {
	c := enter(t, DefaultUser)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); conn.Close() }()
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	conn, err := c.Dial("tcp", "localhost:"+port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "hello")
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
	if back, err := io.ReadAll(conn); string(back) != "hello" || err != nil {
		t.Errorf("%q, %v", back, err)
	}
	for _, to := range []string{"192.0.2.1:80", "example.com:80", "localhost:1", "localhost:0"} {
		if conn, err := c.Dial("tcp", to); err == nil {
			conn.Close()
			t.Errorf("%s can be reached", to)
		}
	}
	// Nothing of the user's machine is offered to the sandbox.
	if _, err := c.Listen("tcp", "127.0.0.1:0"); err == nil {
		t.Error("it listens")
	}
	if _, _, err := c.OpenChannel("direct-streamlocal@openssh.com", nil); err == nil {
		t.Error("a socket's channel is opened")
	}
	if ok, err := newSession(t, c).SendRequest("auth-agent-req@openssh.com", true, nil); ok || err != nil {
		t.Errorf("an agent is taken: %v, %v", ok, err)
	}
}

// TestHostKey: there is one, whoever asks and however many at once, and it is the user's alone.
func TestHostKey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	var all sync.WaitGroup
	keys := make([]string, 8)
	for i := range keys {
		all.Go(func() {
			if key, _, err := HostKey(dir); err != nil {
				t.Error(err)
			} else {
				keys[i] = ssh.FingerprintSHA256(key.PublicKey())
			}
		})
	}
	all.Wait()
	for _, k := range keys {
		if k != keys[0] {
			t.Errorf("%q", keys)
		}
	}
	info, err := os.Stat(filepath.Join(dir, keyFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info, err)
	}
	if err := os.WriteFile(filepath.Join(dir, keyFile), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := HostKey(dir); err == nil || errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("a broken one: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*-*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
