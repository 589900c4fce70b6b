package conformance

import (
	"fmt"
	"slices"
	"strings"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// The annotations by which a container says which pod it is of.
const (
	groupAnnotation = "io.containerd.runc.v2.group"
	criType         = "io.kubernetes.cri.container-type"
	criSandbox      = "io.kubernetes.cri.sandbox-id"
)

var podRows = []row{
	{name: "Members", test: members},
	{name: "Isolation", test: isolation},
	{name: "PauseOne", test: pauseOne},
	{name: "Namespaces", test: podNamespaces},
	{name: "LeaderFirst", test: leaderFirst},
	{name: "ShimDeleteOfMember", test: deleteOfMember},
	{name: "SandboxContainer", test: sandboxContainer},
	{name: "ShimKilled", test: podShimKilled},
}

// lead makes the box the first of a pod.
func (b *box) lead() *box {
	b.annotate(map[string]string{groupAnnotation: b.id})
	return b
}

// member is another container of the same pod.
func (b *box) member() *box {
	b.Helper()
	m := b.d.box(b.T)
	m.pod, m.group = b.pod, b.group
	m.pod.boxes++
	m.annotate(map[string]string{groupAnnotation: b.id})
	return m
}

func (b *box) annotate(a map[string]string) {
	before := b.change
	b.change = func(s *specs.Spec) {
		before(s)
		s.Annotations = a
	}
}

// members: all are in one machine, behind one shim, and each has a life of its own.
func members(b *box) {
	b.lead().run(sleep)
	for i := range 2 {
		m := b.member()
		p := m.run(lines(2, 4+i))
		if m.shim != b.shim || m.address != b.address {
			b.Errorf("a member has shim %d at %s, the pod %d at %s", m.shim, m.address, b.shim, b.address)
		}
		p.ends(uint32(4+i), "line 1\nline 2\n")
		m.must(p.delete())
		m.shutdown()
		m.exactly("create", "start", fmt.Sprintf("exit init %d", 4+i), fmt.Sprintf("delete %d", 4+i))
		b.refused("state of a deleted member", second(p.state()), codes.NotFound)
		b.exec(exit(3)).started().ends(3, "")
	}
	b.init.is(task.Status_RUNNING)
}

// isolation: what ends one container ends no other.
func isolation(b *box) {
	b.lead().run(sleep)
	e := b.exec(sleep).started()

	killed := b.member()
	killed.run(sleep)
	killed.must(second(b.client.Kill(b.d.context(b.T), &taskapi.KillRequest{ID: killed.id, Signal: uint32(unix.SIGKILL), All: true})))
	killed.init.ends(137, "")

	hungry := b.member()
	limit := int64(64 << 20)
	before := hungry.change
	hungry.change = func(s *specs.Spec) {
		before(s)
		s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit, Swap: &limit}
	}
	hungry.run(hog)
	hungry.init.ends(137, "")
	hungry.await("oom")

	b.init.is(task.Status_RUNNING)
	e.is(task.Status_RUNNING)
	for _, event := range b.events() {
		if event == "oom" || strings.HasPrefix(event, "exit") {
			b.Errorf("event %q", event)
		}
	}
	b.must(e.kill(unix.SIGKILL))
	e.ends(137, "")
}

// pauseOne: the others go on.
func pauseOne(b *box) {
	b.lead().run(sleep)
	m := b.member()
	m.run(sleep)
	m.must(m.pause())
	m.init.is(task.Status_PAUSED)
	b.init.is(task.Status_RUNNING)
	b.exec(lines(1, 0)).started().ends(0, "line 1\n")
	m.must(m.resume())
	m.exec(exit(0)).started().ends(0, "")
}

// podNamespaces: a member that names the pod's namespaces by the machine's pid has them, and of others its own.
func podNamespaces(b *box) {
	b.lead().run(sleep)
	pod := b.namespaces()
	for _, join := range [][]string{nil, {"ipc", "uts"}, {"pid", "ipc", "uts"}} {
		m := b.member()
		m.join(b.machine, join)
		m.run(sleep)
		for kind, own := range m.namespaces() {
			if (own == pod[kind]) != slices.Contains(join, kind) {
				b.Errorf("joining %q: %s namespace %q, the pod's %q", join, kind, own, pod[kind])
			}
		}
	}
}

// join has the container name namespaces of the pod.
func (b *box) join(pid int, kinds []string) {
	before := b.change
	b.change = func(s *specs.Spec) {
		before(s)
		for i, ns := range s.Linux.Namespaces {
			if slices.Contains(kinds, string(ns.Type)) {
				s.Linux.Namespaces[i].Path = fmt.Sprintf("/proc/%d/ns/%s", pid, ns.Type)
			}
		}
	}
}

// namespaces are those that the container's processes are in, by type.
func (b *box) namespaces() map[string]string {
	b.Helper()
	found := map[string]string{}
	for _, kind := range []string{"pid", "ipc", "uts"} {
		found[kind] = string(b.exec(namespaceOf(kind)).started().output())
	}
	return found
}

// leaderFirst: a pod goes on without the container that it began with.
func leaderFirst(b *box) {
	b.lead().run(sleep)
	m := b.member()
	m.run(sleep)
	b.must(b.init.kill(unix.SIGKILL))
	b.init.ends(137, "")
	b.must(b.init.delete())
	b.shutdown()
	b.clean()
	m.init.is(task.Status_RUNNING)
	m.exec(lines(1, 0)).started().ends(0, "line 1\n")
}

// deleteOfMember: shim delete for one container ends that one only.
func deleteOfMember(b *box) {
	b.lead().run(sleep)
	m := b.member()
	m.run(sleep)
	if r := m.clean(); r.ExitStatus != 137 {
		b.Errorf("shim delete answers %v", r)
	}
	b.refused("state of the member", second(m.init.state()), codes.NotFound)
	b.init.is(task.Status_RUNNING)
	b.exec(exit(0)).started().ends(0, "")
}

// sandboxContainer: the container that stands for a Kubernetes pod outlives its members, and takes them with it.
func sandboxContainer(b *box) {
	b.annotate(map[string]string{criType: "sandbox", criSandbox: b.id})
	b.run(sleep)
	member := func() *box {
		m := b.member()
		m.annotate(map[string]string{criType: "container", criSandbox: b.id})
		return m
	}
	short := member()
	short.run(exit(6)).ends(6, "")
	short.must(short.init.delete())
	short.shutdown()
	b.init.is(task.Status_RUNNING)

	long := member()
	long.run(sleep)
	e := long.exec(sleep).started()
	b.must(b.init.kill(unix.SIGKILL))
	b.init.ends(137, "")
	e.ends(137, "")
	long.init.ends(137, "")
	long.must(long.init.delete())
	late := member()
	r := late.request(sleep)
	_, err := late.client.Create(b.d.within(b.T, bootLimit), r)
	late.init.opened()
	if err == nil || strings.Contains(err.Error(), "\n") {
		b.Errorf("create in a pod that has ended: %v", err)
	}
}

// podShimKilled: each container's shim delete tells its own end.
func podShimKilled(b *box) {
	b.lead().run(sleep)
	ended := b.member()
	ended.run(exit(9)).ends(9, "")
	running := b.member()
	running.run(sleep)
	for _, c := range []*box{b, ended, running} {
		c.crashed = true
	}
	b.must(unix.Kill(b.shim, unix.SIGKILL))
	for c, want := range map[*box]uint32{ended: 9, running: 137, b: 137} {
		if r := c.clean(); r.ExitStatus != want {
			b.Errorf("shim delete answers %v, want status %d", r, want)
		}
	}
	b.nothingLeft()
}
