package e2b

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/console"
	"golang.org/x/sys/unix"
)

// outsider is somebody with a key and nothing else: no root, no configuration, none of the stack's files.
type outsider struct {
	*client
	cube, home string
	env        []string
}

const nobody = "65534"

func newOutsider(t *testing.T) *outsider {
	t.Helper()
	if _, err := exec.LookPath("ssh"); err != nil {
		t.Skip("SKIPPED: no ssh; make setup installs it")
	}
	home, err := os.MkdirTemp("", "cube-outsider-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	o := &outsider{client: newClient(t), cube: filepath.Join(home, "cube"), home: home}
	// The tree may be where only root can look.
	if out, err := exec.Command("cp", filepath.Join(s.Config.BinDir, "cube"), o.cube).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command("chown", "-R", nobody+":"+nobody, home).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	o.env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TERM=dumb", "CUBE_TIMEOUT_SCALE=" + os.Getenv("CUBE_TIMEOUT_SCALE"),
		"CUBE_API_URL=http://" + s.Config.API.Listen.String(), "CUBE_API_KEY=" + o.key, "CUBE_SANDBOX_URL=http://" + s.Config.Proxy.Listen.String()}
	if os.Getenv("CUBE_TIMEOUT_SCALE") == "" {
		o.env[3] = "CUBE_TIMEOUT_SCALE=1"
	}
	return o
}

// command is one that the outsider runs on the stack's host.
func (o *outsider) command(name string, args ...string) *exec.Cmd {
	c := s.Host.Command("setpriv", append([]string{"--reuid", nobody, "--regid", nobody, "--clear-groups", "--no-new-privs", "--", name}, args...)...)
	c.Env, c.Dir = o.env, o.home
	return c
}

func (o *outsider) runs(name string, args ...string) string {
	o.Helper()
	r := s.Run(o.command(name, args...), nil)
	if r.Err != nil {
		o.Fatalf("%s %q: %v", filepath.Base(name), args, r.Err)
	}
	return r.Stdout
}

// starts starts one that goes on, until the test ends, whose lines of output can be waited for.
func (o *outsider) starts(name string, args ...string) (lines func(words ...string) string, c *exec.Cmd) {
	o.Helper()
	c = o.command(name, args...)
	out, err := c.StdoutPipe()
	if err != nil {
		o.Fatal(err)
	}
	var errs bytes.Buffer
	c.Stderr = &errs
	if err := c.Start(); err != nil {
		o.Fatal(err)
	}
	o.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait() // again, where the test has waited
	})
	told := make(chan string, 100)
	go func() {
		defer close(told)
		for l := bufio.NewScanner(out); l.Scan(); {
			told <- l.Text()
		}
	}()
	return func(words ...string) string {
		o.Helper()
		late := time.After(s.Config.Timeout(time.Minute))
		var all []string
		for {
			select {
			case l, ok := <-told:
				all = append(all, l)
				if has(l, words) {
					return l
				}
				if !ok {
					o.Fatalf("%s ends before %q: %q; %s", args, words, all, &errs)
				}
			case <-late:
				o.Fatalf("%s doesn't tell %q: %q; %s", args, words, all, &errs)
			}
		}
	}, c
}

func has(l string, words []string) bool {
	for _, w := range words {
		if !strings.Contains(l, w) {
			return false
		}
	}
	return true
}

// TestCommandLine: all that the cube command does for who has a key, by one sandbox's life.
func TestCommandLine(t *testing.T) {
	o := newOutsider(t)
	watched, _ := o.starts(o.cube, "ps", "-w")
	watched("ID", "STATE")
	sb := o.create(map[string]any{"metadata": map[string]string{"purpose": "the test's"}})
	watched(sb.ID, "base", "running", "in 59 minutes", "purpose=the test's")
	if out := o.runs(o.cube, "ps"); !strings.Contains(out, sb.ID) {
		t.Errorf("ps: %s", out)
	}
	other := newClient(t)
	for _, args := range [][]string{{"ps", "-q"}, {"logs", sb.ID}, {"ssh", sb.ID, "true"}, {"port-forward", sb.ID, "0:80"}} {
		c := o.command(o.cube, args...)
		c.Env = append(c.Env, "CUBE_API_KEY="+other.key)
		if r := s.Run(c, nil); strings.Contains(r.Stdout, sb.ID) || args[0] != "ps" && (r.Err == nil || !strings.Contains(r.Stderr, "not found")) {
			t.Errorf("another team's %s: %d %s %s", args, r.Code, r.Stdout, r.Stderr)
		}
	}
	t.Run("ssh", func(t *testing.T) { o.with(t).testSSH(sb) })
	t.Run("terminal", func(t *testing.T) { o.with(t).testTerminal(sb) })
	t.Run("files", func(t *testing.T) { o.with(t).testFiles(sb) })
	t.Run("ports", func(t *testing.T) { o.with(t).testPorts(sb) })
	t.Run("logs", func(t *testing.T) {
		o := o.with(t)
		o.runs(o.cube, "ssh", "-l", "root", sb.ID, "echo first > /proc/1/fd/1")
		lines, c := o.starts(o.cube, "logs", "-f", sb.ID)
		lines("first")
		o.runs(o.cube, "ssh", "-l", "root", sb.ID, "echo second > /proc/1/fd/1")
		lines("second")
		// It goes on where it was when cube is there again.
		cube := victims(false)[0]
		cube.dies(t)
		cube.returns(t)
		o.runs(o.cube, "ssh", "-l", "root", sb.ID, "echo third > /proc/1/fd/1")
		for l := lines(); !strings.HasSuffix(l, " third"); l = lines() {
			if strings.HasSuffix(l, " first") || strings.HasSuffix(l, " second") {
				t.Errorf("it is told again: %s", l)
			}
		}
		if out := o.runs(o.cube, "logs", "-n", "1", sb.ID); !strings.HasSuffix(out, " third\n") || strings.Count(out, "\n") != 1 {
			t.Errorf("the last line: %q", out)
		}
		o.do("POST", "/sandboxes/"+sb.ID+"/pause", nil, nil, 204)
		watched(sb.ID, "paused")
		if r := s.Run(o.command(o.cube, "ssh", sb.ID), nil); r.Code != 255 || !strings.Contains(r.Stderr, "is paused") {
			t.Errorf("ssh while it is paused: %d %s", r.Code, r.Stderr)
		}
		o.do("DELETE", "/sandboxes/"+sb.ID, nil, nil, 204)
		if err := c.Wait(); err != nil {
			t.Errorf("logs -f when the sandbox is gone: %v", err)
		}
		watched(sb.ID, "gone")
	})
}

func (o *outsider) with(t *testing.T) *outsider {
	c, with := *o.client, *o
	c.T, with.client = t, &c
	return &with
}

func (o *outsider) testSSH(sb sandbox) {
	r := s.Run(o.command(o.cube, "ssh", sb.ID, "--", "cat; id -un; echo err >&2; exit 7"), []byte("input\n"))
	if r.Code != 7 || r.Stdout != "input\nuser\n" || r.Stderr != "err\n" {
		o.Errorf("%d %q %q", r.Code, r.Stdout, r.Stderr)
	}
	if r := s.Run(o.command(o.cube, "ssh", "-l", "noone", sb.ID, "true"), nil); r.Code != 255 || !strings.Contains(r.Stderr, "there is no user") {
		o.Errorf("no such user: %d %s", r.Code, r.Stderr)
	}
	// By host names and TLS, as from another machine.
	ca := s.Cube("ca", "export")
	file := filepath.Join(o.home, "ca.pem")
	if err := os.WriteFile(file, []byte(ca.Stdout), 0o644); err != nil || ca.Err != nil {
		o.Fatal(err, ca.Err)
	}
	for name, trusts := range map[string]bool{"CUBE_CA_FILE=" + file: true, "SSL_CERT_FILE=" + file: true, "NONE=": false} {
		c := o.command(o.cube, "ssh", sb.ID, "echo by TLS")
		c.Env = append(c.Env, "CUBE_API_URL=https://api."+s.Config.Proxy.Authority(), "CUBE_SANDBOX_URL=", name)
		r := s.Run(c, nil)
		if trusts && r.Stdout != "by TLS\n" || !trusts && (r.Code != 255 || !strings.Contains(r.Stderr, "cube ca export")) {
			o.Errorf("%s: %d %q %q", name, r.Code, r.Stdout, r.Stderr)
		}
	}
}

// testTerminal has an interactive shell with a window that changes.
func (o *outsider) testTerminal(sb sandbox) {
	master, slave, err := console.NewPty()
	if err != nil {
		o.Fatal(err)
	}
	defer master.Close()
	tty, err := os.OpenFile(slave, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		o.Fatal(err)
	}
	defer tty.Close()
	resize := func(rows, columns uint16) {
		if err := master.Resize(console.WinSize{Height: rows, Width: columns}); err != nil {
			o.Fatal(err)
		}
	}
	resize(33, 101)
	c := o.command(o.cube, "ssh", sb.ID)
	c.Stdin, c.Stdout, c.Stderr = tty, tty, tty
	c.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	if err := c.Start(); err != nil {
		o.Fatal(err)
	}
	tty.Close()
	seen := make(chan string)
	go func() {
		defer close(seen)
		var all strings.Builder
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			all.Write(buf[:n])
			if err != nil {
				return
			}
			seen <- all.String()
		}
	}()
	until := func(words string) {
		o.Helper()
		late, last := time.After(s.Config.Timeout(time.Minute)), ""
		for !strings.Contains(last, words) {
			select {
			case text, ok := <-seen:
				if last = text; !ok {
					o.Fatalf("it ends before %q", words)
				}
			case <-late:
				o.Fatalf("no %q in %q", words, last)
			}
		}
	}
	fmt.Fprint(master, "bash -c 'trap \"echo interrup\"\"ted; exit\" INT; stty size; while :; do sleep .1; done'\r")
	until("33 101\r\n")
	resize(44, 120)
	fmt.Fprint(master, "\x03")
	until("interrupted\r\n")
	fmt.Fprint(master, "while [ \"$(stty size)\" != '44 120' ]; do sleep .1; done; echo resi''zed; exit 5\r")
	until("resized")
	go func() {
		for range seen { // ssh says goodbye
		}
	}()
	_ = c.Wait()
	if c.ProcessState.ExitCode() != 5 {
		o.Errorf("its end: %v", c.ProcessState)
	}
}

// testFiles has scp and sftp copy there and back.
func (o *outsider) testFiles(sb sandbox) {
	config, file, back := filepath.Join(o.home, "config"), filepath.Join(o.home, "data"), filepath.Join(o.home, "back")
	data := make([]byte, 300_000)
	_, _ = rand.Read(data)
	if err := os.WriteFile(file, data, 0o644); err != nil {
		o.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(o.runs(o.cube, "ssh", "--config")), 0o644); err != nil {
		o.Fatal(err)
	}
	o.runs("scp", "-q", "-p", "-F", config, file, sb.ID+".cube:there/")
	if got := o.runs("ssh", "-F", config, sb.ID+".cube", "stat -c '%U %s' there"); got != "user 300000\n" {
		o.Errorf("there: %q", got)
	}
	o.runs("scp", "-q", "-F", config, sb.ID+".cube:/home/user/there", back)
	if got, err := os.ReadFile(back); err != nil || !bytes.Equal(got, data) {
		o.Errorf("%d bytes come back, %v", len(got), err)
	}
	r := s.Run(o.command("sftp", "-q", "-F", config, "-b", "-", sb.ID+".cube"), []byte("mkdir d\nrename there d/there\nchmod 600 d/there\nls -1 d\n"))
	if r.Err != nil || !strings.Contains(r.Stdout, "d/there") {
		o.Errorf("sftp: %v %q", r.Err, r.Stdout)
	}
	if r := s.Run(o.command("scp", "-q", "-F", config, file, sb.ID+".cube:/etc/"), nil); r.Err == nil || !strings.Contains(r.Stderr, "ermission denied") {
		o.Errorf("a directory of root's: %d %s", r.Code, r.Stderr)
	}
}

// testPorts gets to a server at the sandbox's loopback that doesn't speak HTTP.
func (o *outsider) testPorts(sb sandbox) {
	const server = `import socket
l = socket.socket(); l.bind(("127.0.0.1", 7000)); l.listen()
while True:
    c, _ = l.accept(); c.sendall(b"hello\n"); said = b""
    while b := c.recv(4096): said += b
    c.sendall(said.upper()); c.close()`
	if out, err := o.run(sb, "setsid python3 -c '"+server+"' >/dev/null 2>&1 </dev/null & sleep 0.1; echo"); err != nil {
		o.Fatal(out, err)
	}
	lines, forwarder := o.starts(o.cube, "port-forward", sb.ID, "0:7000", "0:7001")
	open, _, _ := strings.Cut(lines("-> 7000"), " ->")
	closed, _, _ := strings.Cut(lines("-> 7001"), " ->")
	if !strings.HasPrefix(open, "127.0.0.1:") {
		o.Errorf("it listens at %s", open)
	}
	s.Eventually(o, time.Minute, "the port", func() bool { return o.talks(open) == "hello\nHOW ARE YOU" }) // the server is being started, and relayed
	if got := o.talks(closed); got != "" {
		o.Errorf("nobody is there, and says %q", got)
	}
	// The same by ssh.
	l, err := s.Host.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		o.Fatal(err)
	}
	local := l.Addr().String()
	l.Close()
	_, c := o.starts(o.cube, "ssh", "-N", "-L", local+":localhost:7000", sb.ID)
	s.Eventually(o, time.Minute, "ssh's port", func() bool { return o.talks(local) == "hello\nHOW ARE YOU" })
	for _, c := range []*exec.Cmd{c, forwarder} {
		if err := c.Process.Signal(unix.SIGINT); err != nil {
			o.Error(err)
		}
	}
	_ = forwarder.Wait()
	if code := forwarder.ProcessState.ExitCode(); code != 130 {
		o.Errorf("port-forward ends with %d", code)
	}
}

// talks is what the server says to somebody.
func (o *outsider) talks(address string) string {
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(20*time.Second))
	defer cancel()
	c, err := dial(ctx, "tcp", address)
	if err != nil {
		return ""
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	_ = c.SetDeadline(deadline)
	fmt.Fprint(c, "how are you")
	_ = c.(*net.TCPConn).CloseWrite()
	said, _ := io.ReadAll(c)
	return string(said)
}
