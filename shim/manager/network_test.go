package manager_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
	"github.com/cubesandbox/cube/shim/spec"
)

// killEnv has a shim kill itself when it is about to launch a machine.
const killEnv = "CUBE_TEST_KILL"

const settings = `{"policy": {"default": "allow"}}`

// network puts the test's goroutine, and the shims that it starts, onto a host that has Cube's network.
func (d *daemon) network() *testnet.Host {
	d.Helper()
	h := testnet.New(d.T)
	h.Config.RunDir = d.dir + "/run"
	d.must(os.MkdirAll(h.Config.RunDir, 0o700))
	h.Up()
	return h
}

// place expects that the pod has one, and returns it.
func place(t *testing.T, h *testnet.Host, key string) *network.Attachment {
	t.Helper()
	a, err := h.Get(t.Context(), key)
	testnet.Must(t, err)
	if a.Pod == nil {
		t.Errorf("nobody has claimed %+v", a)
	}
	return a
}

// noPlace expects that nothing is left of any pod's, but taps that are ready for another.
func noPlace(t *testing.T, h *testnet.Host) {
	t.Helper()
	for _, what := range h.Left() {
		if strings.HasPrefix(what, "sandbox") || strings.HasPrefix(what, "addresses") || strings.HasPrefix(what, "attachments") {
			t.Errorf("left: %s", what)
		}
	}
}

// hook adds one that runs before the container is created.
func (d *daemon) hook(script string) {
	file := filepath.Join(d.bundle, "config.json")
	b, err := os.ReadFile(file)
	d.must(err)
	var s specs.Spec
	d.must(json.Unmarshal(b, &s))
	s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", script}}}}
	b, err = json.Marshal(s)
	d.must(err)
	d.must(os.WriteFile(file, b, 0o600))
}

// TestPlaceOfALife: it is there from Create on, for a plugin to open, and with the container it goes.
func TestPlaceOfALife(t *testing.T) {
	d := newDaemon(t)
	h := d.network()
	r, err := d.start()
	d.must(err)
	c := d.connect(r.Address)
	_, err = c.Create(t.Context(), d.createRequest())
	d.must(err)
	a := place(t, h, "ns-box")
	if a.Open {
		t.Errorf("open before anybody has opened it: %+v", a)
	}
	opened, err := h.Open(t.Context(), network.Request{ID: "ns-box", Network: "net", IfName: "eth0", Policy: &policy.Policy{Default: policy.Direct}})
	d.must(err)
	if opened.Tap != a.Tap {
		t.Errorf("%s was opened, %s claimed", opened.Tap, a.Tap)
	}
	_, err = c.Start(t.Context(), &taskapi.StartRequest{ID: id})
	d.must(err)
	_, err = c.Kill(t.Context(), &taskapi.KillRequest{ID: id, Signal: 9})
	d.must(err)
	_, err = c.Wait(t.Context(), &taskapi.WaitRequest{ID: id})
	d.must(err)
	_, err = c.Delete(t.Context(), &taskapi.DeleteRequest{ID: id})
	d.must(err)
	if a, err := h.Get(t.Context(), "ns-box"); err != nil || a.Pod != nil || !a.Open {
		t.Errorf("after the deletion %+v, %v", a, err)
	}
	d.must(h.Close(t.Context(), "ns-box", "net", "eth0"))
	noPlace(t, h)
	d.delete()
}

// TestPlaceOfAKilledShim: wherever it is killed, delete gives the place back.
func TestPlaceOfAKilledShim(t *testing.T) {
	cases := []struct {
		what  string
		kill  func(*daemon)
		asked string
	}{
		{"before there is a machine", func(d *daemon) { d.env = append(d.env, killEnv+"=1") }, settings},
		{"before there is a machine", func(d *daemon) { d.env = append(d.env, killEnv+"=1") }, ""},
		{"before there is a container", func(d *daemon) { d.hook("kill -9 $PPID") }, settings},
		{"before there is a container", func(d *daemon) { d.hook("kill -9 $PPID") }, ""},
		{"later", nil, settings},
		{"later", nil, ""},
	}
	var ids []string
	for i := range cases {
		ids = append(ids, fmt.Sprint("box", i))
	}
	boxes := newPod(t, ids...)
	h := boxes[0].network()
	for i, c := range cases {
		d := boxes[i]
		d.annotations = nil // each is its own pod
		if c.asked != "" {
			d.annotations = map[string]string{spec.NetworkKey: c.asked}
		}
		d.spec("sleep")
		if c.kill != nil {
			c.kill(d)
		}
		r, err := d.start()
		d.must(err)
		pid := d.shimPID()
		_, err = d.connect(r.Address).Create(t.Context(), d.createRequest())
		if (err == nil) != (c.kill == nil) {
			t.Errorf("%s: create: %v", c.what, err)
		}
		if err == nil {
			d.must(unix.Kill(pid, unix.SIGKILL))
		}
		d.ended(pid)
		// It is opened when the guest has its identity, beside the hook that kills the shim before there is a container.
		a, want := place(t, h, "ns-"+d.id), c.kill == nil && c.asked != ""
		if a.Open != want && (c.asked == "" || c.what != "before there is a container") {
			t.Errorf("%s: place %+v", c.what, a)
		}
		if _, warnings := d.delete(); warnings != "" {
			t.Errorf("%s: delete: %s", c.what, warnings)
		}
		noPlace(t, h)
		d.nothingLeft()
	}
}

// TestPlaceThatStays: a pod whose place can't be given back isn't undone, and the next delete tries again.
func TestPlaceThatStays(t *testing.T) {
	d := newDaemon(t)
	h := d.network()
	d.annotations = map[string]string{spec.NetworkKey: settings}
	d.spec("sleep")
	r, err := d.start()
	d.must(err)
	d.create(d.connect(r.Address))
	file := h.Path("attachments", "ns-box", "state.json")
	record, err := os.ReadFile(file)
	d.must(err)
	d.must(os.WriteFile(file, []byte("{"), 0o600))
	pid := d.shimPID()
	d.must(unix.Kill(pid, unix.SIGKILL))
	d.ended(pid)
	if _, warnings := d.delete(); !strings.Contains(warnings, "detach the pod from the network") {
		t.Errorf("delete: %s", warnings)
	}
	if s, err := d.pod().State(); err != nil || s.Undone {
		t.Errorf("record %+v, %v", s, err)
	}
	d.must(os.WriteFile(file, record, 0o600))
	if _, warnings := d.delete(); warnings != "" {
		t.Errorf("delete: %s", warnings)
	}
	noPlace(t, h)
	d.nothingLeft()
}

// TestPlaceOfTheNext: a shim that takes a killed one's place has a place of its own, with nothing of that one's.
func TestPlaceOfTheNext(t *testing.T) {
	members := newPod(t, "a", "late")
	a, late := members[0], members[1]
	h := a.network()
	for _, d := range members {
		d.annotations[spec.NetworkKey] = settings
		d.spec("sleep")
	}
	_, pid := up(t, members[:1])
	old := place(t, h, "ns-pod")
	// More than the next one is allowed.
	late.annotations[spec.NetworkKey] = `{"policy": {"default": "deny"}}`
	late.spec("sleep")
	late.must(unix.Kill(pid, unix.SIGKILL))
	late.ended(pid)
	up(t, members[1:])
	if p := place(t, h, "ns-pod"); !p.Open || p.Policy.Default != policy.Deny || p.Address == old.Address {
		t.Errorf("place %+v after %+v", p, old)
	}
	for _, d := range members {
		if _, warnings := d.delete(); warnings != "" {
			t.Errorf("delete of %s: %s", d.id, warnings)
		}
	}
	noPlace(t, h)
	late.nothingLeft()
}

// TestPlaceOfNobody: a policy that can't be had is refused by the compiler's own words, and a container without a network
// has no place.
func TestPlaceOfNobody(t *testing.T) {
	boxes := newPod(t, "bad", "none")
	h := boxes[0].network()
	for i, c := range []struct{ asked, refusal string }{
		{`{"policy": {"default": "deny", "allow": [{"to": "1.2.3.4/8"}]}}`, `rule 1 (allow "1.2.3.4/8")`},
		{"none", ""},
	} {
		d := boxes[i]
		d.annotations = map[string]string{spec.NetworkKey: c.asked}
		d.spec("sleep")
		r, err := d.start()
		d.must(err)
		_, err = d.connect(r.Address).Create(t.Context(), d.createRequest())
		if (err == nil) != (c.refusal == "") || err != nil && !strings.Contains(err.Error(), c.refusal) {
			t.Errorf("%s: create: %v", d.id, err)
		}
		if a, err := h.Get(t.Context(), "ns-"+d.id); !errdefs.IsNotFound(err) {
			t.Errorf("%s: place %+v, %v", d.id, a, err)
		}
		if _, warnings := d.delete(); warnings != "" {
			t.Errorf("%s: delete: %s", d.id, warnings)
		}
		noPlace(t, h)
	}
}
