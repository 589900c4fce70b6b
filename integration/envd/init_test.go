package envd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd"
	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
)

// client calls the box's daemon.
func (b *box) client() *http.Client {
	return &http.Client{Timeout: waitTime, Transport: &http.Transport{DisableKeepAlives: true, DialContext: b.dial}}
}

// dial connects from within the box's network.
func (b *box) dial(_ context.Context, _, address string) (c net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // until the goroutine ends, and its thread with it
		ns, openErr := os.Open(fmt.Sprintf("/proc/%d/ns/net", b.init.Process.Pid))
		if err = openErr; err != nil {
			return
		}
		defer ns.Close()
		if err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err == nil {
			c, err = net.DialTimeout("tcp", address, waitTime)
		}
	}()
	<-done
	return c, err
}

const address = "http://127.0.0.1:49983"

// call sends a request and returns the answer's status and body.
func (b *box) call(method, path, token, body string) (int, string) {
	b.t.Helper()
	r, err := http.NewRequest(method, address+path, strings.NewReader(body))
	must(b.t, err)
	r.Header.Set("X-Access-Token", token)
	resp, err := b.client().Do(r)
	must(b.t, err)
	defer resp.Body.Close()
	if v := resp.Header.Get("X-Envd-Version"); v != envd.Version {
		b.t.Errorf("version %q", v)
	}
	got, err := io.ReadAll(resp.Body)
	must(b.t, err)
	return resp.StatusCode, string(got)
}

// shell runs a command line as an SDK does and returns what it writes.
func (b *box) shell(token, script string) string {
	b.t.Helper()
	return b.start(token, script, nil)
}

// start is shell, with a terminal if it is given.
func (b *box) start(token, script string, pty *process.PTY) string {
	b.t.Helper()
	c := process.NewProcessClient(b.client(), address, connect.WithProtoJSON())
	r := connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}}, Pty: pty})
	r.Header().Set("X-Access-Token", token)
	s, err := c.Start(context.Background(), r)
	must(b.t, err)
	var out strings.Builder
	for s.Receive() {
		out.Write(s.Msg().GetEvent().GetData().GetStdout())
		out.Write(s.Msg().GetEvent().GetData().GetStderr())
		out.Write(s.Msg().GetEvent().GetData().GetPty())
	}
	must(b.t, s.Err())
	return out.String()
}

// daemon is the daemon's PID in the box.
func (b *box) daemon() string {
	b.t.Helper()
	return strings.TrimSpace(b.run("pgrep", "-f", "^cube-envd -sandbox"))
}

// A daemon that is killed comes again, with what it was told; the sandbox's processes go on.
func TestDaemonIsRestarted(t *testing.T) {
	b := newBox(t, "-user", "user")
	if code, body := b.call("POST", "/init", "", `{"accessToken":"secret","envVars":{"A":"b"},"sandboxID":"ibox","templateID":"base"}`); code != 204 {
		t.Fatal(code, body)
	}
	if name, hosts := b.run("hostname"), b.run("cat", "/etc/hosts"); !strings.Contains(hosts, "\tlocalhost\n") || !strings.Contains(hosts, "\t"+strings.TrimSpace(name)+"\t") {
		t.Errorf("the hosts of %s: %s", name, hosts)
	}
	b.shell("secret", "setsid sleep 4321 >/dev/null 2>&1 & true")
	for i := range 3 {
		before := b.daemon()
		b.run("kill", "-KILL", before)
		b.waitLogTimes("envd serves", i+2)
		if after := b.daemon(); after == before {
			t.Errorf("it is still %s", after)
		}
	}
	if code, body := b.call("GET", "/envs", "", ""); code != 401 || !strings.Contains(body, `"code":401`) {
		t.Errorf("without the token: %d %s", code, body)
	}
	if got := b.shell("secret", `echo "$A $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $FROM_IMAGE"; cat /run/e2b/.E2B_SANDBOX_ID; pgrep -c -f "^sleep 4321"; cat /run/e2b/.envd`); !strings.HasPrefix(got, "b ibox base yes\nibox1\n") || strings.Contains(got, "secret") {
		t.Errorf("%q", got)
	}
	if code, _ := b.call("GET", "/health", "", ""); code != 204 {
		t.Error(code)
	}
}

// A daemon that is killed amid an upload leaves nothing of it once the next one runs.
func TestUploadOfKilledDaemon(t *testing.T) {
	b := newBox(t, "-user", "user")
	const dir = "/home/user/up"
	b.shell("", "mkdir "+dir+"; echo before >"+dir+"/file")
	body, in := io.Pipe()
	r, err := http.NewRequest("POST", address+"/files?path="+dir+"/file", body)
	must(t, err)
	r.Header.Set("Content-Type", "application/octet-stream")
	broke := make(chan error, 1)
	go func() {
		resp, err := b.client().Do(r)
		if err == nil {
			resp.Body.Close()
		}
		broke <- err
	}()
	_, err = io.WriteString(in, strings.Repeat("x", 1<<20))
	must(t, err)
	b.shell("", "until ls "+dir+"/.cube-envd-*; do sleep .02; done")
	b.run("kill", "-KILL", b.daemon())
	in.Close() // the client waits for its own end of the body
	if err := <-broke; err == nil {
		t.Error("the upload has an answer")
	}
	b.waitLogTimes("envd serves", 2)
	if got := b.shell("", "cd "+dir+"; for i in $(seq 500); do ls .cube-envd-* 2>/dev/null || break; sleep .02; done >/dev/null; ls -A; cat file"); got != "file\nbefore\n" {
		t.Errorf("there is %q", got)
	}
}

// waitLogTimes waits until the text has been written so often.
func (b *box) waitLogTimes(text string, n int) {
	b.t.Helper()
	deadline := time.After(waitTime)
	for strings.Count(b.log.String(), text) < n {
		select {
		case <-b.log.new:
		case <-b.done:
			b.t.Fatalf("the box has ended:\n%s", b.log)
		case <-deadline:
			b.t.Fatalf("%q is not there %d times:\n%s", text, n, b.log)
		}
	}
}

// The init collects what processes leave, hands signals to the start command, and ends when it is told to.
func TestInit(t *testing.T) {
	script := `trap 'echo "start has HUP"' HUP; trap 'echo "start ends"; exit 7' TERM; echo "start is $(id -un) $(pwd) $HOME $FROM_IMAGE"; while :; do sleep 1000 & wait; done`
	b := newBox(t, "-user", "user", "-workdir", "/tmp", "--", "bash", "-c", script)
	b.waitLog("start is user /tmp /home/user yes")
	must(t, b.init.Process.Signal(unix.SIGHUP))
	b.waitLog("start has HUP")
	// Orphans: their parent ends at once, and they soon after.
	b.shell("", `for i in 1 2 3 4 5; do (setsid sh -c 'exit 3' &) ; done; exit 0`)
	for deadline := time.Now().Add(waitTime); ; time.Sleep(10 * time.Millisecond) {
		states := b.run("ps", "-e", "-o", "stat=,args=")
		if !regexp.MustCompile(`(?m)^Z`).MatchString(states) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies stay:\n%s", states)
		}
	}
	must(t, b.init.Process.Signal(unix.SIGTERM))
	select {
	case <-b.done:
	case <-time.After(waitTime):
		t.Fatal("the init goes on after SIGTERM")
	}
	if code := b.init.ProcessState.ExitCode(); code != 0 {
		t.Error("exit status", code)
	}
	for _, want := range []string{"start ends", "the start command has ended", "exit status 7"} {
		if !strings.Contains(b.log.String(), want) {
			t.Errorf("no %q", want)
		}
	}
}

// Who doesn't end when told to doesn't keep the init from it.
func TestInitDoesNotWaitForEver(t *testing.T) {
	b := newBox(t, "-user", "user", "--", "bash", "-c", `trap "" TERM; echo deaf; while :; do sleep 1; done`)
	b.waitLog("deaf")
	must(t, b.init.Process.Signal(unix.SIGTERM))
	select {
	case <-b.done:
		t.Fatal("it didn't wait")
	case <-time.After(time.Second):
	}
	must(t, b.init.Process.Signal(unix.SIGTERM)) // now, then
	select {
	case <-b.done:
	case <-time.After(waitTime):
		t.Fatal("the init goes on after a second SIGTERM")
	}
}

// Commands are in a group of their own, terminals in another, and the daemon in neither.
func TestControlGroups(t *testing.T) {
	root := newCgroup(t)
	b := newBoxIn(t, root, "-user", "user", "--", "sh", "-c", "cat /proc/self/cgroup; sleep 1000")
	b.waitLog("0::/user")
	if got := b.shell("", "grep ^0: /proc/self/cgroup; cat /proc/self/oom_score_adj"); got != "0::/user\n100\n" {
		t.Errorf("%q", got)
	}
	if got := b.start("", "grep ^0: /proc/self/cgroup", &process.PTY{Size: &process.PTY_Size{Cols: 80, Rows: 24}}); got != "0::/pty\r\n" {
		t.Errorf("%q", got)
	}
	daemon := b.run("cat", "/proc/"+b.daemon()+"/cgroup", "/proc/1/cgroup")
	if strings.Count(daemon, filepath.Base(root)+"/envd\n") != 2 {
		t.Errorf("%q", daemon)
	}
	for _, group := range []string{"envd", "user", "pty"} {
		if _, err := os.Stat(filepath.Join(root, group)); err != nil {
			t.Error(err)
		}
	}
	if procs, err := os.ReadFile(filepath.Join(root, "cgroup.procs")); err != nil || len(procs) != 0 {
		t.Errorf("%q, %v", procs, err)
	}
}

// newCgroup makes a control group (v2) for a box.
func newCgroup(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: control groups take root")
	}
	mount := t.TempDir()
	if err := unix.Mount("cgroup2", mount, "cgroup2", 0, ""); err != nil {
		t.Skipf("SKIPPED: no cgroup2: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(mount, unix.MNT_DETACH)) })
	root := filepath.Join(mount, "cube-envd-test-"+strconv.Itoa(os.Getpid()))
	must(t, os.Mkdir(root, 0o755))
	t.Cleanup(func() {
		for _, g := range []string{"envd", "user", "pty", ""} {
			// The processes of a box that has ended leave their group when they are reaped.
			for deadline := time.Now().Add(waitTime); errors.Is(os.Remove(filepath.Join(root, g)), unix.EBUSY) && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
		}
	})
	return root
}
