package agent

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func (c *container) pause(t *testing.T) error {
	t.Helper()
	watch := c.m.stopwatch(t)
	_, err := c.m.agent.PauseContainer(contextFor(t, 30*time.Second), &api.ContainerRequest{Id: c.id})
	watch.log("pause")
	return err
}

func (c *container) resume(t *testing.T) error {
	t.Helper()
	_, err := c.m.agent.ResumeContainer(contextFor(t, 30*time.Second), &api.ContainerRequest{Id: c.id})
	return err
}

func (c *container) update(t *testing.T, r any) error {
	t.Helper()
	watch := c.m.stopwatch(t)
	_, err := c.m.agent.UpdateContainer(contextFor(t, 30*time.Second), &api.UpdateContainerRequest{Id: c.id, Resources: marshal(t, r)})
	watch.log("update")
	return err
}

// counter is a program that counts aloud, and says when it gets a SIGTERM.
const counter = `trap 'echo term' TERM; i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done`

// counted reads a line that a counter has said.
func counted(t *testing.T, r io.Reader) string {
	t.Helper()
	var line strings.Builder
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatalf("after %q: %v", line.String(), err)
		}
		if b[0] == '\n' {
			return line.String()
		}
		line.WriteByte(b[0])
	}
}

// A paused container stands still with all that it started, and hears signals when it goes on; another one doesn't notice.
func TestPause(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c, other := m.newContainer(t, "paused"), m.newContainer(t, "unpaused")
	want(t, c.pause(t), codes.NotFound, "paused")
	if err := c.create(t, containerSpec("sh", "-c", counter)); err != nil {
		t.Fatal(err)
	}
	want(t, c.pause(t), codes.FailedPrecondition, "created")
	want(t, c.resume(t), codes.FailedPrecondition, "created")
	c.start(t)
	other.run(t, containerSpec("sh", "-c", counter))
	counted(t, c.stdout)
	_, second, _, err := c.exec(t, "second", process("sh", "-c", counter))
	if err != nil {
		t.Fatal(err)
	}
	counted(t, second)
	if err := c.resume(t); err != nil {
		t.Errorf("resume of what runs: %v", err)
	}
	for range 2 {
		if err := c.pause(t); err != nil {
			t.Fatal(err)
		}
	}
	used := c.stats(t).CPU.GetUsageUsec()
	_, _, _, err = c.exec(t, "late", process("true"))
	want(t, err, codes.FailedPrecondition, "paused")
	want(t, m.remove(t, c.id), codes.FailedPrecondition, "paused")
	if err := m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 15}); err != nil {
		t.Fatal(err)
	}
	for range 20 { // the other one's time passes
		counted(t, other.stdout)
	}
	// What the signal takes is far less than what counting would.
	if used = c.stats(t).CPU.GetUsageUsec() - used; used > 10_000 {
		t.Errorf("paused, and has used %d µs", used)
	}
	if err := c.resume(t); err != nil {
		t.Fatal(err)
	}
	for counted(t, c.stdout) != "term" {
	}
	counted(t, second)
	if err := m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 9, All: true}); err != nil {
		t.Fatal(err)
	}
	f.exit(t, c.id, "second")
	f.exit(t, c.id, "")
	want(t, c.pause(t), codes.FailedPrecondition, "stopped")
	want(t, c.resume(t), codes.FailedPrecondition, "stopped")
	counted(t, other.stdout)
	other.kill(t, f)
}

// What is paused can be killed and deleted, and its name be used again.
func TestKillPaused(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "frozen")
	for _, request := range []*api.SignalProcessRequest{
		{Id: c.id, Signal: 9},
		{Id: c.id, Signal: 9, All: true},
	} {
		c.run(t, containerSpec("sh", "-c", counter))
		if _, _, _, err := c.exec(t, "e", process("sleep", "1000")); err != nil {
			t.Fatal(err)
		}
		if err := c.pause(t); err != nil {
			t.Fatal(err)
		}
		if err := m.signal(t, request); err != nil {
			t.Fatal(err)
		}
		if code := f.exit(t, c.id, "e"); code != 137 {
			t.Errorf("status %d", code)
		}
		if code := f.exit(t, c.id, ""); code != 137 {
			t.Errorf("status %d", code)
		}
		if err := m.remove(t, c.id); err != nil {
			t.Fatal(err)
		}
	}
}

// Limits change while the container runs; what isn't named stays, and so does what devices it may use.
func TestUpdate(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "update")
	s := containerSpec("cat")
	memory, pids, quota, period, shares := int64(64<<20), int64(30), int64(50000), uint64(100000), uint64(2048)
	s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &memory}
	s.Linux.Resources.Pids = &specs.LinuxPids{Limit: &pids}
	c.run(t, s)
	limits := func(id string) map[string]string {
		t.Helper()
		_, out, _, err := c.exec(t, id, process("sh", "-c", `
			for f in memory.max pids.max cpu.max cpu.weight; do echo "$f: $(cat /sys/fs/cgroup/$f)"; done
			test -e /tmp/kmsg || mknod /tmp/kmsg c 1 11
			echo "kmsg: $(cat /tmp/kmsg 2>&1 >/dev/null)"`))
		if err != nil {
			t.Fatal(err)
		}
		got := fields(read(t, out))
		f.exit(t, c.id, id)
		return got
	}
	check := func(got, want map[string]string) {
		t.Helper()
		for k, v := range want {
			if got[k] != v {
				t.Errorf("%s is %q, want %q", k, got[k], v)
			}
		}
	}
	before := limits("before")
	t.Log(before)
	check(before, map[string]string{"memory.max": "67108864", "pids.max": "30", "cpu.max": "max 100000"})
	if !strings.Contains(before["kmsg"], "not permitted") {
		t.Errorf("/dev/kmsg: %q", before["kmsg"])
	}
	if err := c.update(t, &specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares}}); err != nil {
		t.Fatal(err)
	}
	check(limits("cpu"), map[string]string{
		"memory.max": "67108864", "pids.max": "30", "cpu.max": "50000 100000", "cpu.weight": "79", "kmsg": before["kmsg"],
	})
	memory, pids = 96<<20, 40
	if err := c.pause(t); err != nil {
		t.Fatal(err)
	}
	if err := c.update(t, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &memory}, Pids: &specs.LinuxPids{Limit: &pids}}); err != nil {
		t.Fatal(err)
	}
	if err := c.resume(t); err != nil {
		t.Fatal(err)
	}
	check(limits("memory"), map[string]string{"memory.max": fmt.Sprint(memory), "pids.max": "40", "cpu.max": "50000 100000"})
	for _, bad := range []any{"x", &specs.LinuxResources{}, &specs.LinuxResources{Devices: s.Linux.Resources.Devices}} {
		err := c.update(t, bad)
		t.Log(err)
		want(t, err, codes.InvalidArgument, "")
	}
	tooLong := uint64(1 << 40)
	err := c.update(t, &specs.LinuxResources{CPU: &specs.LinuxCPU{Period: &tooLong}})
	want(t, err, codes.Unknown, "cpu.max")
	_ = c.stdin.Close()
	f.exit(t, c.id, "")
	want(t, c.update(t, &specs.LinuxResources{Pids: &specs.LinuxPids{Limit: &pids}}), codes.FailedPrecondition, "stopped")
}

// A limit below what is used is enforced at once.
func TestUpdateBelowUsage(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "shrunk")
	c.run(t, containerSpec("sh", "-c", "head -c 30000000 /dev/zero >/dev/shm/x; echo up; read y"))
	if got := counted(t, c.stdout); got != "up" {
		t.Fatalf("%q", got)
	}
	limit := int64(8 << 20)
	if err := c.update(t, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}}); err != nil {
		t.Fatal(err)
	}
	if e := f.next(t, c.id); e.GetOom() == nil {
		t.Fatalf("got %v, want a kill for want of memory first", e)
	}
	if code := f.exit(t, c.id, ""); code != 137 {
		t.Errorf("status %d", code)
	}
}
