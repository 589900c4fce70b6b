// Package ctr is what a user of containerd's own client sees: ctr with --runtime io.cube.v2 against the real thing.
package ctr

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/console"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }

// runArgs is `ctr run` of the demo image in a machine.
func runArgs(id string, flags []string, cmd ...string) []string {
	args := append([]string{"run", "--runtime", "io.cube.v2", "--snapshotter", "cube"}, flags...)
	return append(append(args, stack.Image, id), cmd...)
}

// detached starts a container that sleeps and removes it at the end of the test.
func detached(t *testing.T, name string, cmd ...string) string {
	t.Helper()
	id := s.ID(t, name)
	if len(cmd) == 0 {
		cmd = []string{"sleep", "1000"}
	}
	if r := s.Ctr(runArgs(id, []string{"-d"}, cmd...)...); r.Err != nil {
		t.Fatal(r.Err)
	}
	t.Cleanup(func() {
		s.Ctr("task", "kill", "-s", "KILL", id)
		s.Ctr("task", "rm", "-f", id)
		if r := s.Ctr("container", "rm", id); r.Err != nil {
			t.Error(r.Err)
		}
		noLeaks(t, id)
	})
	return id
}

func noLeaks(t *testing.T, ids ...string) {
	t.Helper()
	s.Eventually(t, 5*time.Second, "shims gone", func() bool { return len(s.VMLeaks()) == 0 && len(stack.CgroupLeaks(ids...)) == 0 })
}

func guestKernel(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.Config.GuestDir(), "manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	var m struct{ Kernel string }
	if err := json.Unmarshal(b, &m); err != nil || m.Kernel == "" {
		t.Fatalf("manifest: %v, kernel %q", err, m.Kernel)
	}
	return m.Kernel
}

func TestRunShowsGuestKernelAndExitCode(t *testing.T) {
	id := s.ID(t, "t1")
	r := s.Ctr(runArgs(id, []string{"--rm"}, "sh", "-c", "uname -r; exit 7")...)
	if r.Code != 7 {
		t.Fatalf("exit code %d, want 7: %s", r.Code, r.Stderr)
	}
	if got := strings.TrimSpace(r.Stdout); got != guestKernel(t) {
		t.Fatalf("kernel %q, want the guest's %q", got, guestKernel(t))
	}
	noLeaks(t, id)
}

func TestExitCodes(t *testing.T) {
	for _, code := range []int{0, 1, 42, 127, 255} {
		r := s.Ctr(runArgs(s.ID(t, "code"), []string{"--rm"}, "sh", "-c", "exit "+strconv.Itoa(code))...)
		if r.Code != code {
			t.Errorf("exit code %d, want %d: %s", r.Code, code, r.Stderr)
		}
	}
}

func TestSameImageUnderRunc(t *testing.T) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	r := s.Ctr("run", "--rm", "--runtime", "io.containerd.runc.v2", "--snapshotter", "cube", stack.Image, s.ID(t, "runc"), "uname", "-r")
	if got := strings.TrimSpace(r.Stdout); r.Err != nil || got != unix.ByteSliceToString(u.Release[:]) {
		t.Fatalf("got %q, %v; want the host's kernel", got, r.Err)
	}
}

func TestOutputBeforeExitIsWhole(t *testing.T) {
	r := s.Ctr(runArgs(s.ID(t, "out"), []string{"--rm"}, "sh", "-c", "seq 1 200000; echo done >&2; exit 3")...)
	if r.Code != 3 || strings.Count(r.Stdout, "\n") != 200000 || !strings.HasSuffix(r.Stdout, "\n200000\n") {
		t.Fatalf("code %d, %d lines: %s", r.Code, strings.Count(r.Stdout, "\n"), r.Stderr)
	}
	if strings.TrimSpace(r.Stderr) != "done" {
		t.Fatalf("stderr %q", r.Stderr)
	}
}

func TestStdinThroughAPipe(t *testing.T) {
	data := make([]byte, 20<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	r := s.Run(s.Command("ctr", runArgs(s.ID(t, "stdin"), []string{"--rm"}, "sha256sum")...), data)
	if r.Err != nil || !strings.HasPrefix(r.Stdout, hex.EncodeToString(sum[:])) {
		t.Fatalf("got %q, %v; want %x", r.Stdout, r.Err, sum)
	}
	r = s.Run(s.Command("ctr", runArgs(s.ID(t, "cat"), []string{"--rm"}, "cat")...), data)
	if r.Err != nil || !bytes.Equal([]byte(r.Stdout), data) {
		t.Fatalf("cat gave %d bytes back of %d: %v", len(r.Stdout), len(data), r.Err)
	}
}

func TestTask(t *testing.T) {
	id := detached(t, "task")
	pid := s.PID(t, id)

	cmdline, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err != nil || !strings.Contains(string(cmdline), id) || !strings.Contains(string(cmdline), "qemu-system") {
		t.Errorf("the task's pid %d is %q, %v; want the machine's QEMU with the id in its name", pid, cmdline, err)
	}

	t.Run("exec", func(t *testing.T) {
		r := s.Ctr("task", "exec", "--exec-id", "e1", id, "sh", "-c", "echo out; echo err >&2; exit 5")
		if r.Code != 5 || r.Stdout != "out\n" || !strings.Contains(r.Stderr, "err\n") {
			t.Fatalf("%+v", r)
		}
	})
	t.Run("exec of what isn't there", func(t *testing.T) {
		r := s.Ctr("task", "exec", "--exec-id", "e2", id, "/no/such/command")
		if r.Code == 0 || !strings.Contains(r.Stderr, "executable file `/no/such/command` not found") {
			t.Fatalf("%+v", r)
		}
		if lines := strings.Count(strings.TrimSpace(r.Stderr), "\n"); lines > 0 {
			t.Errorf("the error has %d lines: %s", lines+1, r.Stderr)
		}
	})
	t.Run("exec with stdin", func(t *testing.T) {
		r := s.Run(s.Command("ctr", "task", "exec", "--exec-id", "e3", id, "cat"), []byte("through a pipe"))
		if r.Err != nil || r.Stdout != "through a pipe" {
			t.Fatalf("%+v", r)
		}
	})
	t.Run("exec with tty", func(t *testing.T) { execTTY(t, id) })
	t.Run("ls", func(t *testing.T) {
		if !regexp.MustCompile(id + `\s+` + strconv.Itoa(pid) + `\s+RUNNING`).MatchString(s.Ctr("task", "ls").Stdout) {
			t.Error(s.Ctr("task", "ls").Stdout)
		}
	})
	t.Run("ps", func(t *testing.T) {
		if r := s.Ctr("task", "ps", id); r.Err != nil || !strings.Contains(r.Stdout, strconv.Itoa(pid)) {
			t.Errorf("%+v", r)
		}
	})
	t.Run("metrics", func(t *testing.T) {
		r := s.Ctr("task", "metrics", "--format", "json", id)
		var m map[string]any
		if err := json.Unmarshal([]byte(r.Stdout), &m); r.Err != nil || err != nil || m["memory"] == nil || m["cpu"] == nil {
			t.Errorf("%+v: %v", r, err)
		}
	})
	t.Run("kill", func(t *testing.T) {
		if r := s.Ctr("task", "kill", "-s", "KILL", id); r.Err != nil {
			t.Fatal(r.Err)
		}
		s.Eventually(t, 5*time.Second, "task stopped", func() bool { return strings.Contains(s.Ctr("task", "ls").Stdout, "STOPPED") })
		if r := s.Ctr("task", "rm", id); !strings.Contains(r.Stderr, "exit code 137") {
			t.Errorf("ctr task rm says %q, want exit code 137", r.Stderr)
		}
	})
}

// execTTY runs a shell on a terminal: it is one, it has the size of ours, and it ends with what the shell said.
func execTTY(t *testing.T, id string) {
	master, slavePath, err := console.NewPty()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if err := master.Resize(console.WinSize{Width: 91, Height: 33}); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(slavePath, os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd := s.Command("ctr", "task", "exec", "--tty", "--exec-id", "tty", id, "sh", "-c", "read x; tty; stty size; echo got:$x; exit 9")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close()
	var out bytes.Buffer
	read := make(chan struct{})
	go func() { _, _ = io.Copy(&out, master); close(read) }()
	if _, err := master.Write([]byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(s.Config.Timeout(30*time.Second), func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	_ = cmd.Wait()
	<-read
	if code := cmd.ProcessState.ExitCode(); code != 9 || !strings.Contains(out.String(), "/dev/pts/") ||
		!strings.Contains(out.String(), "33 91") || !strings.Contains(out.String(), "got:hello") {
		t.Fatalf("code %d, output %q", code, out.String())
	}
}

func TestContainerSeesItsOwnMachine(t *testing.T) {
	id := s.ID(t, "sees")
	script := `hostname; id -u; grep -c . /proc/1/cgroup; ls -d /sys/fs/cgroup/cgroup.controllers; touch /written && ls /written; nproc; ls / | tr '\n' ' '`
	r := s.Ctr(runArgs(id, []string{"--rm", "--hostname", "sandbox-1"}, "sh", "-c", script)...)
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	lines := strings.Split(r.Stdout, "\n")
	if lines[0] != "sandbox-1" || lines[1] != "0" || lines[2] != "1" || !strings.Contains(r.Stdout, "/written") {
		t.Fatalf("%q", r.Stdout)
	}
	if strings.Contains(lines[len(lines)-1], "init") {
		t.Fatalf("the container sees the agent's root: %q", r.Stdout)
	}
}

func TestClockIsTheHosts(t *testing.T) {
	r := s.Ctr(runArgs(s.ID(t, "clock"), []string{"--rm"}, "date", "+%s")...)
	got, err := strconv.ParseInt(strings.TrimSpace(r.Stdout), 10, 64)
	if d := time.Now().Unix() - got; r.Err != nil || err != nil || d < -2 || d > int64(s.Config.Timeout(10*time.Second).Seconds()) {
		t.Fatalf("guest clock is %d s behind the host's: %+v", d, r)
	}
}

func TestRestoredMachinesDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 3 {
		r := s.Ctr(runArgs(s.ID(t, "random"), []string{"--rm"}, "sh", "-c", "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid")...)
		if r.Err != nil || seen[r.Stdout] {
			t.Fatalf("two machines from one base gave the same random bytes, or %v: %s", r.Err, r.Stdout)
		}
		seen[r.Stdout] = true
	}
}

func TestAnnotationsGiveTheShape(t *testing.T) {
	r := s.Ctr(runArgs(s.ID(t, "shape"), []string{"--rm", "--annotation", "io.cube.vcpus=2", "--annotation", "io.cube.memory=512MiB"}, "sh", "-c", "nproc; grep MemTotal /proc/meminfo")...)
	var cpus, kib int
	if r.Err == nil {
		f := strings.Fields(r.Stdout)
		cpus, _ = strconv.Atoi(f[0])
		kib, _ = strconv.Atoi(f[2])
	}
	if cpus != 2 || kib < 400<<10 || kib > 512<<10 {
		t.Fatalf("%d CPUs and %d KiB: %+v", cpus, kib, r)
	}
}

// TestOtherSnapshotters runs the image from directories, which the shim packs into a disk.
func TestOtherSnapshotters(t *testing.T) {
	for _, snapshotter := range []string{"overlayfs", "native"} {
		t.Run(snapshotter, func(t *testing.T) {
			id := s.ID(t, snapshotter)
			r := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", snapshotter, stack.Image, id,
				"sh", "-c", "uname -r; echo written > /etc/motd && cat /etc/motd")
			if r.Err != nil || r.Stdout != guestKernel(t)+"\nwritten\n" {
				t.Fatalf("%+v", r)
			}
			noLeaks(t, id)
		})
	}
}
