package agent

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// want checks an error's code, and that it is one line with these words.
func want(t *testing.T, err error, code codes.Code, words string) {
	t.Helper()
	if text := status.Convert(err).Message(); status.Code(err) != code || !strings.Contains(text, words) || strings.Contains(text, "\n") {
		t.Errorf("got %v, want %v with %q", err, code, words)
	}
}

func (m *machine) signal(t *testing.T, r *api.SignalProcessRequest) error {
	t.Helper()
	_, err := m.agent.SignalProcess(contextFor(t, 10*time.Second), r)
	return err
}

func (m *machine) remove(t *testing.T, id string) error {
	t.Helper()
	watch := m.stopwatch(t)
	_, err := m.agent.DeleteContainer(contextFor(t, 30*time.Second), &api.ContainerRequest{Id: id})
	watch.log("delete")
	return err
}

func TestStates(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "states")
	start := func() error {
		_, err := m.agent.StartContainer(contextFor(t, 30*time.Second), &api.ContainerRequest{Id: c.id})
		return err
	}
	want(t, start(), codes.NotFound, "states")
	if err := c.create(t, containerSpec("cat")); err != nil {
		t.Fatal(err)
	}
	_, _, _, err := c.exec(t, "early", process("true"))
	want(t, err, codes.FailedPrecondition, "created")
	first := [2]io.Reader{c.stdout, c.stderr}
	want(t, c.create(t, containerSpec("cat")), codes.AlreadyExists, "states")
	if got := read(t, c.stdout); got != "" {
		t.Errorf("the second container's output %q", got)
	}
	c.start(t)
	want(t, start(), codes.FailedPrecondition, "running")
	want(t, m.remove(t, "states"), codes.FailedPrecondition, "running")
	want(t, m.signal(t, &api.SignalProcessRequest{Id: "states", ExecId: "none", Signal: 9}), codes.NotFound, "none")
	want(t, m.signal(t, &api.SignalProcessRequest{Id: "states", Signal: 99}), codes.InvalidArgument, "99")
	if err := m.signal(t, &api.SignalProcessRequest{Id: "states", Signal: 9}); err != nil {
		t.Error(err)
	}
	if code := f.exit(t, "states", ""); code != 137 {
		t.Errorf("status %d", code)
	}
	for _, r := range first {
		if b, err := io.ReadAll(r); len(b) != 0 || err != nil {
			t.Errorf("%q, %v", b, err)
		}
	}
	want(t, m.signal(t, &api.SignalProcessRequest{Id: "states", Signal: 9}), codes.NotFound, "finished")
	_, _, _, err = c.exec(t, "late", process("true"))
	want(t, err, codes.FailedPrecondition, "stopped")
	if _, err := m.agent.ResizePty(contextFor(t, 10*time.Second), &api.ResizePtyRequest{Id: "states", Columns: 1, Rows: 1}); err != nil {
		t.Errorf("resize of what has ended: %v", err)
	}
	for range 2 {
		if err := m.remove(t, "states"); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
	want(t, m.signal(t, &api.SignalProcessRequest{Id: "states", Signal: 9}), codes.NotFound, "states")
}

func TestKillAndDeleteWhatNeverStarted(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "unstarted")
	if err := c.create(t, containerSpec("true")); err != nil {
		t.Fatal(err)
	}
	if err := m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 9}); err != nil {
		t.Error(err)
	}
	if code := f.exit(t, c.id, ""); code != 137 {
		t.Errorf("status %d", code)
	}
	if err := m.remove(t, c.id); err != nil {
		t.Fatal(err)
	}
	if err := c.create(t, containerSpec("true")); err != nil {
		t.Fatal(err)
	}
	if err := m.remove(t, c.id); err != nil {
		t.Error(err)
	}
	f.exit(t, c.id, "")
}

// A container that can't be created leaves nothing behind: the next one gets the same disk and name.
func TestCreateFails(t *testing.T) {
	m := sharedMachine(t)
	c := m.newContainer(t, "fails")
	for _, tc := range []struct {
		name   string
		change func(*specs.Spec)
		code   codes.Code
		words  string
	}{
		{"no command", func(s *specs.Spec) { s.Process.Args = []string{"no-such"} }, codes.InvalidArgument, "executable file `no-such` not found"},
		{"not executable", func(s *specs.Spec) { s.Process.Args = []string{"/etc/passwd"} }, codes.InvalidArgument, "Permission denied"},
		{"bind mount", func(s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/x", Source: "/", Type: "bind"})
		}, codes.InvalidArgument, "/x"},
		{"sysctl", func(s *specs.Spec) { s.Linux.Sysctl = map[string]string{"net.no.such": "1"} }, codes.Unknown, "no"},
		{"rlimit", func(s *specs.Spec) { s.Process.Rlimits[0].Type = "RLIMIT_X" }, codes.Unknown, "RLIMIT_X"},
		{"working directory", func(s *specs.Spec) { s.Process.Cwd = "/etc/passwd" }, codes.Unknown, ""},
	} {
		s := containerSpec("true")
		tc.change(s)
		err := c.create(t, s)
		t.Log(tc.name, err)
		want(t, err, tc.code, tc.words)
		if got := read(t, c.stdout); got != "" {
			t.Errorf("%s: output %q", tc.name, got)
		}
	}
	good := c.rootfs
	for name, r := range map[string]*api.Rootfs{
		"nothing":          nil,
		"wrong type":       {Disks: []*api.Disk{{Serial: c.disks[0].Serial, Fstype: "erofs"}}},
		"pseudo":           {Disks: []*api.Disk{{Serial: c.disks[0].Serial, Fstype: "proc"}}},
		"two, no overlay":  {Disks: append([]*api.Disk{{Serial: "x"}}, c.disks...)},
		"bad serial":       {Disks: []*api.Disk{{Serial: "../x", Fstype: "ext4"}}},
		"no lower":         {Disks: c.disks, Overlay: &api.Overlay{Lower: []*api.LayerDir{{Path: "none"}}}},
		"lower leads away": {Disks: c.disks, Overlay: &api.Overlay{Lower: []*api.LayerDir{{Path: "../.."}}}},
	} {
		c.rootfs = r
		if err := c.create(t, containerSpec("true")); err == nil {
			t.Errorf("%s: created", name)
		} else {
			t.Log(name, err)
		}
	}
	c.rootfs = good
	for _, id := range []string{"", "..", "a/b", "-x", strings.Repeat("x", 77), "a\nb"} {
		_, err := m.agent.CreateContainer(contextFor(t, 10*time.Second), &api.CreateContainerRequest{Id: id, Spec: marshal(t, containerSpec("true")), Rootfs: c.rootfs})
		want(t, err, codes.InvalidArgument, "no id")
	}
	_, err := m.agent.CreateContainer(contextFor(t, 10*time.Second), &api.CreateContainerRequest{
		Id: "fails", Spec: marshal(t, containerSpec("true")), Rootfs: c.rootfs, Stdio: &api.Stdio{Stdout: 4_000_000},
	})
	want(t, err, codes.InvalidArgument, "no such stream")
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(time.Second))
	defer cancel()
	_, err = m.agent.CreateContainer(ctx, &api.CreateContainerRequest{
		Id: "fails", Spec: marshal(t, containerSpec("true")), Rootfs: &api.Rootfs{Disks: []*api.Disk{{Serial: "absent", Fstype: "ext4"}}},
	})
	if err == nil {
		t.Error("created on an absent disk")
	}
	f := m.events(t)
	// The call above is over for the host before the guest has tidied up.
	for err = status.Error(codes.AlreadyExists, ""); status.Code(err) == codes.AlreadyExists; {
		err = c.create(t, containerSpec("echo", "fine"))
	}
	if err != nil {
		t.Fatal(err)
	}
	c.start(t)
	if got := read(t, c.stdout); got != "fine\n" {
		t.Errorf("output %q", got)
	}
	f.exit(t, "fails", "")
}

func TestTerminal(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "terminal")
	names := &api.Stdio{Terminal: true}
	c.stdin, names.Stdin = m.open(t)
	c.stdout, names.Stdout = m.open(t)
	if err := c.createWith(t, containerSpec("sh", "-c", "read x; stty size; tty -s; echo got $x; sleep 1000"), names); err != nil {
		t.Fatal(err)
	}
	resize := func(exec string) {
		t.Helper()
		if _, err := m.agent.ResizePty(contextFor(t, 10*time.Second), &api.ResizePtyRequest{Id: c.id, ExecId: exec, Columns: 101, Rows: 31}); err != nil {
			t.Error(err)
		}
	}
	resize("")
	c.start(t)
	if _, err := c.stdin.Write([]byte("line\n")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 0, 100)
	for !strings.Contains(string(b), "got line\r\n") {
		n, err := c.stdout.Read(b[len(b):cap(b)])
		if b = b[:len(b)+n]; err != nil {
			t.Fatalf("%q, %v", b, err)
		}
	}
	if !strings.Contains(string(b), "31 101\r\n") {
		t.Errorf("%q", b)
	}

	names = &api.Stdio{Terminal: true}
	in, id := m.open(t)
	names.Stdin, names.Stdout = id, id // one stream for both
	if err := c.execWith(t, "sh", process("sh"), names); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("stty size; exit 5\n")); err != nil {
		t.Fatal(err)
	}
	if got := read(t, in); !strings.Contains(got, "24 80\r\n") {
		t.Errorf("%q", got)
	}
	if code := f.exit(t, "terminal", "sh"); code != 5 {
		t.Errorf("status %d", code)
	}
	if err := m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 9}); err != nil {
		t.Error(err)
	}
	if code := f.exit(t, "terminal", ""); code != 137 {
		t.Errorf("status %d", code)
	}
	if got := read(t, c.stdout); got != "" {
		t.Errorf("%q", got)
	}
}

// The root grows with its disk, and an overlay takes what it needs from several disks.
func TestRoots(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := &container{m: m, id: "large"}
	image := m.image(t, "16M")
	if err := os.Truncate(image, 200<<20); err != nil {
		t.Fatal(err)
	}
	c.addDisk(t, "large", image)
	c.rootfs = &api.Rootfs{Disks: c.disks}
	c.run(t, containerSpec("sh", "-c", "df -m / | tail -n 1"))
	if got := strings.Fields(read(t, c.stdout)); len(got) < 2 || len(got[1]) < 3 {
		t.Errorf("the root's size is %v, want about 190 MiB", got)
	}
	f.exit(t, "large", "")

	over := &container{m: m, id: "overlay"}
	upper := t.TempDir() + "/upper"
	if out, err := exec.Command("mkfs.ext4", "-q", upper, "16M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	over.addDisk(t, "lower", m.image(t, "16M"))
	over.addDisk(t, "upper", upper)
	over.disks[0].Options = []string{"ro"}
	over.rootfs = &api.Rootfs{Disks: over.disks, Overlay: &api.Overlay{
		Lower: []*api.LayerDir{{Disk: 0}}, Upper: &api.LayerDir{Disk: 1, Path: "fs"}, Work: &api.LayerDir{Disk: 1, Path: "work"},
	}}
	over.run(t, containerSpec("sh", "-c", "echo new >/file; cat /file; grep -o ' / / .*overlay' /proc/self/mountinfo | grep -c overlay"))
	if got := read(t, over.stdout); got != "new\n1\n" {
		t.Errorf("%q, %q", got, read(t, over.stderr))
	}
	f.exit(t, "overlay", "")
	if err := m.remove(t, "overlay"); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("debugfs", "-R", "cat /fs/file", upper).Output()
	if string(out) != "new\n" || err != nil {
		t.Errorf("on the upper disk: %q, %v", out, err)
	}
}

// A grandchild that keeps the pipe doesn't hold an exec's end up.
func TestGrandchildKeepsThePipe(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "grandchild")
	c.run(t, containerSpec("sleep", "1000"))
	_, out, _, err := c.exec(t, "parent", process("sh", "-c", "sleep 1000 & head -c 50000 /dev/zero"))
	if err != nil {
		t.Fatal(err)
	}
	if got := read(t, out); len(got) != 50000 {
		t.Errorf("%d bytes", len(got))
	}
	if code := f.exit(t, "grandchild", "parent"); code != 0 {
		t.Errorf("status %d", code)
	}
	if err := m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 9, All: true}); err != nil {
		t.Error(err)
	}
	f.exit(t, "grandchild", "")
}
