package agent

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func TestIdentity(t *testing.T) {
	m := sharedMachine(t)
	r := m.configure(t)
	if !strings.HasPrefix(r.Kernel, "6.") || r.MemoryBytes < 150<<20 || r.MemoryBytes > 256<<20 || r.AgentVersion == "" {
		t.Errorf("%v", r)
	}
	bad := func(r *api.ConfigureRequest, code codes.Code, words string) {
		t.Helper()
		_, err := m.agent.Configure(contextFor(t, 10*time.Second), r)
		want(t, err, code, words)
	}
	bad(&api.ConfigureRequest{UnixNanos: 1, Entropy: make([]byte, 31), SandboxId: "x"}, codes.Unknown, "31 bytes of entropy")
	bad(&api.ConfigureRequest{UnixNanos: 1, Entropy: make([]byte, 32)}, codes.Unknown, "id")
	bad(&api.ConfigureRequest{UnixNanos: 1, Entropy: make([]byte, 32), SandboxId: "x", Hostname: strings.Repeat("h", 65)}, codes.InvalidArgument, "longer than 64")
	m.configure(t)

	f := m.events(t)
	c := m.newContainer(t, "clock")
	c.run(t, containerSpec("sh", "-c", "while read x; do date +%s; done"))
	off := func() time.Duration {
		t.Helper()
		if _, err := c.stdin.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, err := c.stdout.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		d, err := time.ParseDuration(strings.TrimSpace(string(b[:n])) + "s")
		if err != nil {
			t.Fatal(err)
		}
		return time.Until(time.Unix(0, 0).Add(d))
	}
	if d := off(); d.Abs() > 5*time.Second {
		t.Errorf("the guest's clock is off by %v", d)
	}
	set := func(to time.Time) {
		t.Helper()
		if _, err := m.agent.SetTime(contextFor(t, 10*time.Second), &api.SetTimeRequest{UnixNanos: to.UnixNano()}); err != nil {
			t.Fatal(err)
		}
	}
	set(time.Now().Add(time.Hour))
	if d := off() - time.Hour; d.Abs() > 5*time.Second {
		t.Errorf("after a step the guest's clock is off by %v", d)
	}
	set(time.Now())
	set(time.Now().Add(20 * time.Millisecond)) // slewed
	if d := off(); d.Abs() > 5*time.Second {
		t.Errorf("the guest's clock is off by %v", d)
	}
	_ = c.stdin.CloseWrite()
	f.exit(t, "clock", "")
}

// A host that begins anew finds the containers, whose input hasn't ended, and the events that it hasn't acknowledged.
func TestNewSession(t *testing.T) {
	m := sharedMachine(t)
	c := m.newContainer(t, "survivor")
	c.run(t, containerSpec("sh", "-c", "echo first; read x; echo second; exit 4"))
	if _, err := c.stdout.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	m.events(t)
	_, err := m.agent.CreateContainer(contextFor(t, 10*time.Second), &api.CreateContainerRequest{Id: "survivor"})
	want(t, err, codes.AlreadyExists, "survivor")
	m.connect(t) // as after a restore: the old session's host is just not there any more
	_, err = m.agent.CreateContainer(contextFor(t, 10*time.Second), &api.CreateContainerRequest{Id: "other"})
	want(t, err, codes.FailedPrecondition, "identity")
	m.configure(t)
	f := m.events(t)
	if err := m.signal(t, &api.SignalProcessRequest{Id: "survivor", Signal: 9}); err != nil {
		t.Error(err)
	}
	if code := f.exit(t, "survivor", ""); code != 137 {
		t.Errorf("status %d", code)
	}
}

func TestQuiesce(t *testing.T) {
	m := sharedMachine(t)
	if _, err := m.agent.Quiesce(contextFor(t, 30*time.Second), &emptypb.Empty{}); err != nil {
		t.Fatal(err)
	}
	_, err := m.agent.CreateContainer(contextFor(t, 10*time.Second), &api.CreateContainerRequest{Id: "early"})
	want(t, err, codes.FailedPrecondition, "identity")
	m.configure(t)
	c := m.newContainer(t, "busy")
	if err := c.create(t, containerSpec("true")); err != nil {
		t.Fatal(err)
	}
	_, err = m.agent.Quiesce(contextFor(t, 30*time.Second), &emptypb.Empty{})
	want(t, err, codes.FailedPrecondition, "1 containers")
}

// Shutdown kills what runs, writes everything to the disks and ends the machine.
func TestShutdown(t *testing.T) {
	m := boot(t)
	defer m.end()
	image := m.image(t, "16M")
	m.plug(t, "root", image)
	c := &container{m: m, id: "root", rootfs: &api.Rootfs{Disks: []*api.Disk{{Serial: "root", Fstype: "ext4"}}}}
	c.run(t, containerSpec("sh", "-c", "echo kept >/file; echo written; sleep 1000"))
	if _, err := c.stdout.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	watch := time.Now()
	if _, err := m.agent.Shutdown(contextFor(t, 30*time.Second), &emptypb.Empty{}); err != nil {
		t.Fatal(err)
	}
	answered := time.Since(watch)
	_ = m.session.Close()
	m.awaitEnd(t)
	t.Logf("answered after %v, ended after %v", answered.Round(time.Millisecond), time.Since(watch).Round(time.Millisecond))
	if !m.process.ProcessState.Success() {
		t.Errorf("QEMU: %v", m.process.ProcessState)
	}
	out, err := exec.Command("debugfs", "-R", "cat /file", image).Output()
	if string(out) != "kept\n" || err != nil {
		t.Errorf("on the disk: %q, %v", out, err)
	}
	if out, err := exec.Command("e2fsck", "-fn", image).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
}

// Neither a paused container nor one that waits for a silent server of its share holds the machine's end up.
func TestShutdownWhatStandsStill(t *testing.T) {
	if os.Getenv("CUBE_TEST_LONG") == "" {
		t.Skip("waits for deadlines: set CUBE_TEST_LONG=1")
	}
	m := boot(t)
	defer m.end()
	container := func(id string) *container {
		m.plug(t, id, m.image(t, "16M"))
		return &container{m: m, id: id, rootfs: &api.Rootfs{Disks: []*api.Disk{{Serial: id, Fstype: "ext4"}}}}
	}
	paused, waits := container("paused"), container("waits")
	paused.run(t, containerSpec("sh", "-c", counter))
	if err := paused.pause(t); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	server := &unreliable{Conn: helper(t, dir, false)}
	waits.serve(t, server, dir, false)
	s := containerSpec("sh", "-c", "while :; do echo x >/data/x; echo up; done")
	s.Mounts = append(s.Mounts, mount("/data", "cube-share", "0"))
	waits.run(t, s)
	counted(t, waits.stdout)
	server.silent.Store(true)
	if _, err := m.agent.Shutdown(contextFor(t, 30*time.Second), &emptypb.Empty{}); err != nil {
		t.Fatal(err)
	}
	_ = m.session.Close()
	m.awaitEnd(t)
}

// A machine that the host can't reach any more ends itself, also without loss.
func TestHostGoesAway(t *testing.T) {
	m := boot(t)
	defer m.end()
	image := m.image(t, "16M")
	m.plug(t, "root", image)
	c := &container{m: m, id: "root", rootfs: &api.Rootfs{Disks: []*api.Disk{{Serial: "root", Fstype: "ext4"}}}}
	c.run(t, containerSpec("sh", "-c", "echo kept >/file; echo written; sleep 1000"))
	if _, err := c.stdout.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	_ = m.channel.Close()
	m.awaitEnd(t)
	if out, err := exec.Command("debugfs", "-R", "cat /file", image).Output(); string(out) != "kept\n" || err != nil {
		t.Errorf("on the disk: %q, %v; console:\n%s", out, err, m.console)
	}
}
