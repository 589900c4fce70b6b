// Package cli is what a user of the cube command sees, with everything real: containers, images, and the stack's life.
package cli

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/console"
	"github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }

// ok runs cube, which must succeed, and returns its stdout.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	r := s.Cube(args...)
	if r.Err != nil {
		t.Fatalf("cube %s: %v", strings.Join(args, " "), r.Err)
	}
	return r.Stdout
}

// list is `cube ps --json`.
func list(t *testing.T, args ...string) map[string]sandbox.Container {
	t.Helper()
	var all []sandbox.Container
	if err := json.Unmarshal([]byte(ok(t, append([]string{"ps", "--json"}, args...)...)), &all); err != nil {
		t.Fatal(err)
	}
	byID := make(map[string]sandbox.Container)
	for _, c := range all {
		byID[c.ID] = c
	}
	return byID
}

// sorted is the words of an output in alphabetical order.
func sorted(out string) string {
	words := strings.Fields(out)
	slices.Sort(words)
	return strings.Join(words, " ")
}

// noContainers makes sure that a test has left none.
func noContainers(t *testing.T) {
	t.Helper()
	if left := ok(t, "ps", "-aq"); left != "" {
		t.Errorf("containers are left: %s", left)
	}
	defer func() {
		if left := s.VMLeaks(); len(left) > 0 {
			t.Logf("left: %q", left)
		}
	}()
	s.Eventually(t, 10*time.Second, "no machines left", func() bool { return len(s.VMLeaks()) == 0 })
	if fifos, err := filepath.Glob(filepath.Join(s.Config.RunDir, "fifo", "*")); err != nil || len(fifos) > 0 {
		t.Errorf("pipes are left: %v, %v", fifos, err)
	}
}

func TestRunInTheForeground(t *testing.T) {
	r := s.Cube("run", "--rm", "--name", s.ID(t, "fg"), "-e", "A=b c", "-w", "/usr", "-u", "1:2", stack.Image,
		"sh", "-c", `echo "$A $(pwd) $(id -u):$(id -g)"; echo err >&2; exit 7`)
	if r.Code != 7 || r.Stdout != "b c /usr 1:2\n" || r.Stderr != "err\n" {
		t.Errorf("%+v", r)
	}
	noContainers(t)
}

func TestRunNamedUser(t *testing.T) {
	if r := s.Cube("run", "--rm", "-u", "nobody", stack.Image, "id", "-un"); r.Stdout != "nobody\n" {
		t.Errorf("%+v", r)
	}
	if r := s.Cube("run", "--rm", "-u", "stranger", stack.Image, "id"); r.Code != 125 || !strings.Contains(r.Stderr, `"stranger" isn't in the image`) {
		t.Errorf("%+v", r)
	}
	noContainers(t)
}

func TestRunWithLimits(t *testing.T) {
	r := s.Cube("run", "--rm", "--cpus", "0.5", "-m", "128MiB", "--disk", "5GiB", stack.Image,
		"sh", "-c", "cd /sys/fs/cgroup; cat cpu.max memory.max; echo $(($(stat -f -c '%b * %S' /) >> 20))")
	var quota, period, memory, disk int64
	_, err := fmt.Sscan(r.Stdout, &quota, &period, &memory, &disk)
	if err != nil || 2*quota != period || memory != 128<<20 || disk < 4700 || disk > 5*1024 {
		t.Errorf("%d of %d µs, %d bytes of memory, a file system of %d MiB: %v: %+v", quota, period, memory, disk, err, r)
	}
}

func TestVolumes(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "from-host"), []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := s.Cube("run", "--rm", "-v", dir+":/data", "-v", dir+":/look:ro", stack.Image, "sh", "-c",
		"cat /data/from-host && echo hi >/data/from-guest && chown 7:8 /data/from-guest && ! touch /look/x")
	if r.Err != nil || r.Stdout != "hello\n" {
		t.Fatalf("%q, %v", r.Stdout, r.Err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "from-guest"))
	if err != nil || string(b) != "hi\n" {
		t.Fatalf("%q, %v", b, err)
	}
	fi, err := os.Stat(filepath.Join(dir, "from-guest"))
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != 7 || st.Gid != 8 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
}

func TestStdin(t *testing.T) {
	in := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	r := s.Run(s.Command("cube", "run", "--rm", "-i", stack.Image, "wc", "-c"), in)
	if r.Err != nil || strings.TrimSpace(r.Stdout) != "1048576" {
		t.Errorf("%+v", r)
	}
	if r := s.Run(s.Command("cube", "run", "--rm", stack.Image, "wc", "-c"), in); strings.TrimSpace(r.Stdout) != "0" {
		t.Errorf("without -i it has stdin: %+v", r)
	}
	noContainers(t)
}

func TestDetachedLife(t *testing.T) {
	watched := watchPS(t)
	r := s.Cube("run", "-d", stack.Image, "sh", "-c", "echo one; echo two >&2; while [ ! -e /go ]; do sleep 0.1; done; echo three; exit 3")
	if r.Err != nil || !regexp.MustCompile(`^[0-9a-f]{12}\n$`).MatchString(r.Stdout) {
		t.Fatalf("stdout must be the id and nothing else: %+v", r)
	}
	id := strings.TrimSpace(r.Stdout)
	if c := list(t)[id]; c.Status != "running" || c.Image != stack.Image || c.PID == 0 {
		t.Errorf("%+v", c)
	}
	if ids := ok(t, "ps", "-q"); ids != id+"\n" {
		t.Errorf("ids %q", ids)
	}
	// Two streams have no order between them.
	s.Eventually(t, 10*time.Second, "the output so far", func() bool {
		return sorted(ok(t, "logs", id)) == "one two"
	})

	follow := s.Command("cube", "logs", "-f", id)
	var out bytes.Buffer
	follow.Stdout = &out
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	if r := s.Cube("exec", "-e", "X=1", id, "sh", "-c", "echo $X; exit 5"); r.Code != 5 || r.Stdout != "1\n" {
		t.Errorf("exec: %+v", r)
	}
	s.Cube("exec", id, "touch", "/go") // it may be killed by the end that it brings about
	if err := follow.Wait(); err != nil || sorted(out.String()) != "one three two" {
		t.Errorf("followed %q, %v", out.String(), err)
	}
	watched(id, stack.Image, "running")
	watched(id, "gone") // from those that run
	c := list(t, "-a")[id]
	if c.Status != "stopped" || c.ExitStatus == nil || *c.ExitStatus != 3 {
		t.Errorf("%+v", c)
	}
	if r := s.Cube("exec", id, "true"); r.Code != 125 || !strings.Contains(r.Stderr, "isn't running") {
		t.Errorf("exec in a container that has ended: %+v", r)
	}
	ok(t, "rm", id)
	if r := s.Cube("logs", id); r.Code != 1 {
		t.Errorf("the log of a container that is no more: %+v", r)
	}
	if _, err := os.Stat(sandbox.LogPath(s.Config, id)); err == nil {
		t.Error("the log file is left")
	}
	noContainers(t)
}

// watchPS has `cube ps -w` tell what happens while the test goes on, and returns what waits for one of its lines.
func watchPS(t *testing.T) func(words ...string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "ps")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := s.Command("cube", "ps", "-w")
	c.Stdout, c.Stderr = f, f
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGINT)
		_ = c.Wait()
		if code := c.ProcessState.ExitCode(); code != 130 {
			t.Errorf("cube ps -w ends with %d", code)
		}
	})
	wait := func(words ...string) {
		t.Helper()
		s.Eventually(t, 20*time.Second, fmt.Sprintf("a line of cube ps -w with %q", words), func() bool {
			text, err := os.ReadFile(name)
			return err == nil && slices.ContainsFunc(strings.Split(string(text), "\n"), func(l string) bool {
				return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(l, w) })
			})
		})
	}
	wait("ID", "IMAGE", "STATUS")
	return wait
}

func TestStopAndRemove(t *testing.T) {
	id := s.ID(t, "stop")
	ok(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", "trap 'echo ended; exit 0' TERM; echo up; while :; do sleep 0.1; done")
	s.Eventually(t, 10*time.Second, "its handler", func() bool { return ok(t, "logs", id) == "up\n" })
	if r := s.Cube("run", "-d", "--name", id, stack.Image, "true"); r.Code != 125 || !strings.Contains(r.Stderr, "exists already") {
		t.Errorf("the same id again: %+v", r)
	}
	if r := s.Cube("rm", id); r.Code != 1 || !strings.Contains(r.Stderr, "-f") {
		t.Errorf("rm of a running container: %+v", r)
	}
	ok(t, "stop", id)
	if got := ok(t, "logs", id); got != "up\nended\n" {
		t.Errorf("it wasn't asked to end: %q", got)
	}
	if c, there := list(t, "-a")[id]; !there || c.Status != "" {
		t.Errorf("a stopped container: %+v", c)
	}
	ok(t, "stop", id) // there is nothing to do
	ok(t, "rm", id)

	ok(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
	ok(t, "rm", "-f", id)
	noContainers(t)
}

func TestSignals(t *testing.T) {
	for _, tc := range []struct {
		name   string
		script string
		signal unix.Signal
		times  int
		code   int
	}{
		{"passed on", "trap 'exit 9' USR1; echo up; while :; do sleep 0.1; done", unix.SIGUSR1, 1, 9},
		{"ignored until the third", "trap '' INT; echo up; while :; do sleep 0.1; done", unix.SIGINT, 3, 137},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := s.Command("cube", "run", "--rm", "--name", s.ID(t, "sig"), stack.Image, "sh", "-c", tc.script)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(out, make([]byte, len("up\n"))); err != nil {
				t.Fatal(err)
			}
			for range tc.times {
				if err := cmd.Process.Signal(tc.signal); err != nil {
					t.Fatal(err)
				}
				time.Sleep(50 * time.Millisecond) // equal signals that are pending become one
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != tc.code {
				t.Errorf("code %d, want %d", code, tc.code)
			}
			noContainers(t)
		})
	}
}

func TestInterruptWhileStarting(t *testing.T) {
	cmd := s.Command("cube", "run", "--rm", "--name", s.ID(t, "early"), stack.Image, "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, 10*time.Second, "the container's record", func() bool { return len(list(t, "-a")) > 0 })
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Signal(unix.SIGINT) // should it have started meanwhile, the third one kills it
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code == 0 {
		t.Error("it ended well")
	}
	noContainers(t)
}

func TestTerminal(t *testing.T) {
	id := s.ID(t, "tty")
	ok(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
	defer func() {
		ok(t, "rm", "-f", id)
		noContainers(t)
	}()
	for _, args := range [][]string{
		{"exec", "-it", id, "bash", "--norc"},
		{"run", "--rm", "-it", "--name", id + "2", stack.Image, "bash", "--norc"},
	} {
		t.Run(args[0], func(t *testing.T) {
			pty, path, err := console.NewPty()
			if err != nil {
				t.Fatal(err)
			}
			defer pty.Close()
			if err := pty.Resize(console.WinSize{Width: 99, Height: 33}); err != nil {
				t.Fatal(err)
			}
			tty, err := os.OpenFile(path, os.O_RDWR|unix.O_NOCTTY, 0)
			if err != nil {
				t.Fatal(err)
			}
			cmd := s.Command("cube", args...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
			cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
			err = cmd.Start()
			tty.Close()
			if err != nil {
				t.Fatal(err)
			}
			kill := time.AfterFunc(s.Config.Timeout(time.Minute), func() { _ = cmd.Process.Kill() })
			defer kill.Stop()

			seen := ""
			until := func(word string) {
				t.Helper()
				buf := make([]byte, 4096)
				for {
					if _, rest, ok := strings.Cut(seen, word); ok {
						seen = rest // it may have come together with what is waited for next
						return
					}
					n, err := pty.Read(buf)
					seen += string(buf[:n])
					if err != nil {
						t.Fatalf("%v before %q in %q", err, word, seen)
					}
				}
			}
			typed := func(line string) {
				t.Helper()
				if _, err := pty.Write([]byte(line)); err != nil {
					t.Fatal(err)
				}
			}
			until("# ")
			typed("stty size\n")
			until("33 99")
			until("# ")
			if err := pty.Resize(console.WinSize{Width: 88, Height: 22}); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(unix.SIGWINCH); err != nil {
				t.Fatal(err)
			}
			typed("until stty size | grep '22 88'; do sleep 0.1; done\n")
			until("\r22 88")
			until("# ")
			typed("sh -c 'echo go; exec sleep 1000'\n")
			until("\rgo")
			typed("\x03") // a byte for the terminal there, no signal here
			until("# ")
			typed("exit 5\n")
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 5 {
				t.Errorf("code %d, want 5", code)
			}
		})
	}
	if r := s.Run(s.Command("cube", "exec", "-it", id, "true"), []byte("x")); r.Code != 125 || !strings.Contains(r.Stderr, "not a terminal") {
		t.Errorf("-it without a terminal: %+v", r)
	}
}

func TestImportFromStdin(t *testing.T) {
	archive, err := os.ReadFile(stack.DemoArchive())
	if err != nil {
		t.Fatal(err)
	}
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	if _, err := w.Write(archive); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r := s.Run(s.Command("cube", "image", "import", "--name", "cube.local/again:1", "-"), zipped.Bytes())
	if r.Err != nil || !strings.Contains(r.Stdout, "cube.local/again:1\n") || r.Stderr != "" {
		t.Fatalf("%+v", r)
	}
	if names := ok(t, "image", "ls", "-q"); names != "cube.local/again:1\n"+stack.Image+"\n" {
		t.Errorf("images %q", names)
	}
	ok(t, "image", "rm", "cube.local/again:1")
	if names := ok(t, "image", "ls", "-q"); names != stack.Image+"\n" {
		t.Errorf("images %q", names)
	}
}

// halfImport is a command that imports an image of which half has come.
func halfImport(t *testing.T) *exec.Cmd {
	t.Helper()
	archive, err := os.ReadFile(stack.DemoArchive())
	if err != nil {
		t.Fatal(err)
	}
	cmd := s.Command("cube", "image", "import", "--name", "cube.local/half:1", "-")
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		_, err = in.Write(archive[:len(archive)/2])
	}
	if err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, 10*time.Second, "its lease", func() bool { return leased(t) })
	return cmd
}

// leased tells whether containerd is asked to keep anything.
func leased(t *testing.T) bool {
	t.Helper()
	r := s.Ctr("leases", "ls", "-q")
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	return r.Stdout != ""
}

// TestImportGivenUp: what has come of an image is let go.
func TestImportGivenUp(t *testing.T) {
	cmd := halfImport(t)
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it ended well")
	}
	if leased(t) {
		t.Error("containerd is still asked to keep it")
	}
}

func TestPull(t *testing.T) {
	l, err := s.Host.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &httptest.Server{Listener: l, Config: &http.Server{Handler: registry.New()}}
	srv.Start()
	defer srv.Close()
	ref := strings.TrimPrefix(srv.URL, "http://") + "/some/debian:12"
	if r := s.Ctr("image", "push", "--plain-http", ref, stack.Image); r.Err != nil {
		t.Fatal(r.Err)
	}

	// A run pulls what isn't here.
	if r := s.Cube("run", "--rm", ref, "cat", "/etc/debian_version"); r.Err != nil || !strings.HasPrefix(r.Stdout, "12") {
		t.Errorf("%+v", r)
	}
	if got := ok(t, "image", "pull", ref); got != ref+"\n" {
		t.Errorf("stdout %q, want the image's name", got)
	}
	var images []sandbox.Image
	if err := json.Unmarshal([]byte(ok(t, "image", "ls", "--json")), &images); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, i := range images {
		if i.Name == ref {
			found = i.Unpacked && i.Size > 0 && strings.Join(i.Platforms, "") == "linux/amd64"
		}
	}
	if !found {
		t.Errorf("images %+v", images)
	}
	ok(t, "image", "rm", ref)
	if r := s.Cube("image", "pull", ref+"-none"); r.Code != 1 || !strings.Contains(r.Stderr, "doesn't have it") {
		t.Errorf("%+v", r)
	}
	noContainers(t)
}
