package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func (c *container) stats(t *testing.T) *stats.Metrics {
	t.Helper()
	r, err := c.m.agent.Stats(contextFor(t, 10*time.Second), &api.ContainerRequest{Id: c.id})
	if err != nil {
		t.Fatal(err)
	}
	metrics := &stats.Metrics{}
	if err := proto.Unmarshal(r.Metrics, metrics); err != nil {
		t.Fatal(err)
	}
	return metrics
}

// kill kills all of the container's processes and takes its first one's exit.
func (c *container) kill(t *testing.T, f *follower) {
	t.Helper()
	if err := c.m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 9, All: true}); err != nil {
		t.Fatal(err)
	}
	if code := f.exit(t, c.id, ""); code != 137 {
		t.Errorf("%s: status %d", c.id, code)
	}
}

// says runs a shell command in the container and returns what it says.
func (c *container) says(t *testing.T, f *follower, id, command string) string {
	t.Helper()
	_, out, errs, err := c.exec(t, id, process("sh", "-c", command))
	if err != nil {
		t.Fatal(err)
	}
	said := read(t, out) + read(t, errs)
	f.exit(t, c.id, id)
	return strings.TrimSpace(said)
}

// What happens to one container of a machine doesn't happen to another one.
func TestSiblings(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	stays := m.newContainer(t, "stays")
	stays.run(t, containerSpec("sh", "-c", "echo mine >/file; echo up; cat"))
	counted(t, stays.stdout)
	unharmed := func(after string) {
		t.Helper()
		if _, err := stays.stdin.Write([]byte(after + "\n")); err != nil {
			t.Fatal(err)
		}
		if got := counted(t, stays.stdout); got != after {
			t.Errorf("after %s: %q", after, got)
		}
		if got := stays.says(t, f, "check", "cat /file; set -- /proc/[0-9]*; echo $#"); got != "mine\n2" { // cat, and this shell
			t.Errorf("after %s: %q", after, got)
		}
	}
	unharmed("nothing")

	limit := int64(16 << 20)
	for _, tc := range []struct {
		what    string
		command string
		memory  *specs.LinuxMemory
		kill    bool
		status  uint32
	}{
		{what: "kill of all", command: "sleep 1000 & echo up; sleep 1000", kill: true, status: 137},
		{what: "exit", command: "echo up; exit 3", status: 3},
		{what: "OOM", command: "echo up; x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done", memory: &specs.LinuxMemory{Limit: &limit, Swap: &limit}, status: 137},
	} {
		c := m.newContainer(t, "goes")
		s := containerSpec("sh", "-c", "test ! -e /file || exit 99; "+tc.command)
		s.Linux.Resources.Memory = tc.memory
		c.run(t, s)
		if got := counted(t, c.stdout); got != "up" {
			t.Errorf("%s: %q", tc.what, got)
		}
		if tc.kill {
			if got := c.says(t, f, "e", "ls /file 2>&1; hostname"); !strings.Contains(got, "No such file") {
				t.Errorf("%s: %q", tc.what, got)
			}
			if err := m.signal(t, &api.SignalProcessRequest{Id: c.id, Signal: 9, All: true}); err != nil {
				t.Fatal(err)
			}
		}
		if tc.memory != nil {
			if e := f.next(t, c.id); e.GetOom() == nil {
				t.Fatalf("%s: %v", tc.what, e)
			}
		}
		if code := f.exit(t, c.id, ""); code != tc.status {
			t.Errorf("%s: status %d", tc.what, code)
		}
		unharmed(tc.what)
		c.discard(t)
		unharmed("unplugging after " + tc.what)
	}
	_ = stays.stdin.CloseWrite()
	if code := f.exit(t, stays.id, ""); code != 0 {
		t.Errorf("status %d", code)
	}
	for _, e := range f.seen {
		if e.GetOom().GetId() == stays.id {
			t.Error("the one that stays is told of a kill for want of memory")
		}
	}
}

// with has a container share namespaces of another one.
func (c *container) with(owner *container, types ...string) *container {
	for _, t := range types {
		c.namespaces = append(c.namespaces, &api.Namespace{Type: t, Container: owner.id})
	}
	return c
}

// namespaceIDs are the namespaces that a container's first process is in.
func (c *container) namespaceIDs(t *testing.T, f *follower) map[string]string {
	t.Helper()
	said := c.says(t, f, "namespaces", "for n in pid ipc uts net mnt cgroup; do echo $n: $(readlink /proc/self/ns/$n); done")
	return fields(said)
}

// Containers have those namespaces in common that are asked for, and the network; nothing else.
func TestNamespaces(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	owner := m.newContainer(t, "owner")
	owner.run(t, containerSpec("sh", "-c", "sleep 1000 & wait"))
	theirs := owner.namespaceIDs(t, f)
	for _, tc := range []struct {
		common   []string
		hostname string
	}{
		{nil, "mine"},
		{[]string{"ipc", "uts"}, "box"},
		{[]string{"ipc", "uts", "pid"}, "box"},
	} {
		c := m.newContainer(t, "member").with(owner, tc.common...)
		s := containerSpec("sleep", "1000")
		s.Hostname = "mine"
		c.run(t, s)
		common := "net " + strings.Join(tc.common, " ")
		for n, id := range c.namespaceIDs(t, f) {
			if (id == theirs[n]) != strings.Contains(common, n) {
				t.Errorf("with %v in common: %s is %s, the owner's is %s", tc.common, n, id, theirs[n])
			}
		}
		if got := c.says(t, f, "name", "hostname"); got != tc.hostname {
			t.Errorf("with %v in common the name is %q", tc.common, got)
		}
		c.kill(t, f)
		c.discard(t)
	}
	if got := owner.says(t, f, "after", "hostname; ps | grep -c '[s]leep 1000'"); got != "box\n2" {
		t.Errorf("the owner says %q", got)
	}

	c := m.newContainer(t, "refused")
	for _, tc := range []struct {
		n    *api.Namespace
		code codes.Code
		want string
	}{
		{&api.Namespace{Type: "pid", Container: "nobody"}, codes.FailedPrecondition, "nobody"},
		{&api.Namespace{Type: "pid", Container: c.id}, codes.FailedPrecondition, "being created"},
		{&api.Namespace{Type: "pid"}, codes.InvalidArgument, "guest's pid namespace"},
		{&api.Namespace{Type: "mount", Container: owner.id}, codes.InvalidArgument, "mount"},
	} {
		c.namespaces = []*api.Namespace{tc.n}
		want(t, c.create(t, containerSpec("true")), tc.code, tc.want)
	}
	c.namespaces = nil
	owner.kill(t, f)
	want(t, c.with(owner, "ipc").create(t, containerSpec("true")), codes.FailedPrecondition, "stopped")
}

// The guest's own namespaces outlast every container that has them.
func TestGuestNamespaces(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	var first map[string]string
	for range 2 {
		c := m.newContainer(t, "member").with(&container{}, "ipc", "uts")
		s := containerSpec("sleep", "1000")
		s.Hostname = "mine"
		c.run(t, s)
		got := c.namespaceIDs(t, f)
		if first == nil {
			first = got
		}
		for _, n := range []string{"ipc", "uts", "net"} {
			if got[n] != first[n] {
				t.Errorf("%s is %s, of the container before it was %s", n, got[n], first[n])
			}
		}
		if got := c.says(t, f, "name", "hostname"); got != "guest" {
			t.Errorf("the name is %q", got)
		}
		c.kill(t, f)
		c.discard(t)
	}
}

// In another's pid namespace a container's end takes its own processes along, and the owner's end everybody's.
func TestCommonPIDs(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	owner := m.newContainer(t, "pids")
	owner.run(t, containerSpec("sleep", "1000"))
	member := m.newContainer(t, "pids-member").with(owner, "pid")
	member.run(t, containerSpec("sh", "-c", "sleep 2000 & echo up; read x; exit 5"))
	counted(t, member.stdout)
	if got := owner.says(t, f, "ps", "ps | grep -c '[s]leep 2000'"); got != "2" { // sh, and what it has started
		t.Errorf("the owner sees %q", got)
	}
	if _, err := member.stdin.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	if code := f.exit(t, member.id, ""); code != 5 {
		t.Errorf("status %d", code)
	}
	if err := m.remove(t, member.id); err != nil {
		t.Fatal(err)
	}
	if got := owner.says(t, f, "ps", "ps | grep -c '[s]leep 2000'"); got != "0" {
		t.Errorf("the owner still sees %q", got)
	}

	member.run(t, containerSpec("sleep", "2000"))
	if _, _, _, err := member.exec(t, "e", process("sleep", "3000")); err != nil {
		t.Fatal(err)
	}
	if err := m.signal(t, &api.SignalProcessRequest{Id: owner.id, Signal: 9}); err != nil {
		t.Fatal(err)
	}
	var order []string
	for len(order) < 3 {
		e := f.next(t, owner.id, member.id).GetExit()
		if e.GetStatus() != 137 {
			t.Errorf("%v", e)
		}
		order = append(order, e.GetId()+"/"+e.GetExecId())
	}
	// Those of one container have an order; containers have none among them.
	if len(order) != 3 || !slices.Contains(order, "pids/") || slices.Index(order, "pids-member/e") > slices.Index(order, "pids-member/") {
		t.Errorf("the ends came as %s", order)
	}
}
