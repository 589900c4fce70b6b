package task

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/hostile"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm"
)

// places is a network with a place for the harness's pod.
type places struct {
	*testing.T
	launcher *fake.Launcher
	// attach, if set, is what gives the pod its place; else it has none.
	attach func(context.Context) (*pod.Attachment, error)

	mu       sync.Mutex
	asked    []spec.Network
	released int
	held     bool
	quiet    []bool   // whether each machine has had nothing pass before Open
	lines    []string // what was asked of a place by a rollback
	refuse   error    // what Release returns
}

func (p *places) Attach(ctx context.Context, _ *config.Config, name network.Pod, asked spec.Network, quiet bool, _ *slog.Logger) (*pod.Attachment, error) {
	if name != (network.Pod{Namespace: "testing", ID: cid}) {
		p.Errorf("attach %s", name)
	}
	if _, ok := ctx.Deadline(); !ok {
		p.Error("attach without a deadline")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held {
		p.Error("attached twice")
	}
	p.asked, p.quiet, p.held = append(p.asked, asked), append(p.quiet, quiet), true
	if p.attach == nil {
		return nil, nil
	}
	return p.attach(ctx)
}

func (p *places) Release(ctx context.Context, _ *config.Config, name network.Pod) error {
	if name != (network.Pod{Namespace: "testing", ID: cid}) {
		p.Errorf("release %s", name)
	}
	if _, ok := ctx.Deadline(); !ok {
		p.Error("release without a deadline")
	}
	for _, m := range p.launcher.All() {
		if m.Request.ID == cid && !m.Stopped() {
			p.Error("released while a machine has the tap")
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuse != nil {
		return p.refuse
	}
	p.held = false
	p.released++
	return nil
}

// asks expects that a rollback has asked just this of the place, in that order.
func (p *places) asks(want string) {
	p.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if got := strings.Join(p.lines, ", "); got != want {
		p.Errorf("asked of the network: %s; not %s", got, want)
	}
	p.lines = nil
}

// ended expects that the place has been given back once.
func (p *places) ended(what string) {
	p.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held || p.released != 1 {
		p.Errorf("%s: held %v, released %d times", what, p.held, p.released)
	}
}

// tap is a file in the place of a tap, which knows whether it is open.
func (h *harness) tap() *os.File {
	h.Helper()
	f, err := os.Open(os.DevNull)
	h.must(err)
	h.Cleanup(func() { f.Close() })
	return f
}

func closed(f *os.File) bool {
	_, err := f.Stat()
	return errors.Is(err, os.ErrClosed)
}

// attached is a place whose MTU changes as mtus tells.
func (h *harness) attached(mtus <-chan uint32) *pod.Attachment {
	h.Helper()
	line := func(what string) func(context.Context) error {
		return func(ctx context.Context) error {
			if _, ok := ctx.Deadline(); !ok {
				h.Errorf("%s without a deadline", what)
			}
			h.network.mu.Lock()
			defer h.network.mu.Unlock()
			h.network.lines = append(h.network.lines, what)
			return nil
		}
	}
	return &pod.Attachment{
		Tap:   h.tap(),
		Guest: &api.Network{Address: "192.0.2.2/30", Gateway: "192.0.2.1", Mtu: 1400},
		Open:  func(context.Context) error { return nil },
		Hold: func(ctx context.Context, tap *os.File) error {
			if tap == nil || closed(tap) {
				h.Error("held without its tap")
			}
			return line("hold")(ctx)
		},
		Resume: line("resume"),
		Renew: func(ctx context.Context) error {
			if slices.ContainsFunc(h.launcher.Last().Guest.Calls(), func(s string) bool { return strings.HasSuffix(s, "/Thaw") }) {
				return line("renew awake")(ctx)
			}
			return line("renew")(ctx)
		},
		Follow: func(ctx context.Context, changed func(uint32)) error {
			for {
				select {
				case mtu := <-mtus:
					changed(mtu)
				case <-ctx.Done():
					return nil
				}
			}
		},
	}
}

// The machine gets the tap, the guest its address, and the shim keeps nothing.
func TestNetwork(t *testing.T) {
	h := newHarness(t)
	want := h.attached(nil)
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return want, nil }
	h.launcher.Before = func(context.Context) {
		if closed(want.Tap) {
			t.Error("the tap is closed before the machine has it")
		}
	}
	h.must(h.pod.Reserve(spec.Common{}))
	asks := small
	asks.Network = spec.Network{Settings: &network.Settings{}}
	if _, err := h.pod.StartMachine(t.Context(), asks); err != nil {
		t.Fatal(err)
	}
	m := h.launcher.Last()
	if m.Request.Tap != want.Tap || !closed(want.Tap) {
		t.Errorf("the machine's tap is %v, want %v, closed by the shim", m.Request.Tap, want.Tap)
	}
	if !proto.Equal(m.Guest.Identity().Network, want.Guest) {
		t.Errorf("the guest's network is %v, want %v", m.Guest.Identity().Network, want.Guest)
	}
	app := h.member("app", nil, "exit", "0").run()
	app.wait("")
	app.delete()
	if len(h.network.asked) != 1 || h.network.asked[0] != asks.Network || h.network.released != 0 {
		t.Errorf("asked %v for one machine, released %d times", h.network.asked, h.network.released)
	}
	h.must(h.pod.StopMachine(t.Context()))
	h.network.ended("stopped")
	if !h.podState().Undone {
		t.Errorf("record %+v", h.podState())
	}
}

// The guest is told when its card is to have another MTU, with all else as it was.
func TestFollowMTU(t *testing.T) {
	h := newHarness(t)
	mtus := make(chan uint32)
	want := h.attached(mtus)
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return want, nil }
	h.run("sleep")
	first := h.launcher.Last().Guest.Identity()
	for _, mtu := range []uint32{1300, 1500} {
		mtus <- mtu
		mtus <- mtu // taken after the guest has answered
		got := h.launcher.Last().Guest.Identity()
		if got.Network.Mtu != mtu || got.Network.Address != want.Guest.Address || got.Hostname != first.Hostname || got.SandboxId != first.SandboxId {
			t.Errorf("told %v after %v", got, first)
		}
	}
}

// However the machine ends, the place in the network is given back once, and after it.
func TestReleaseWithTheMachine(t *testing.T) {
	for name, end := range map[string]func(*harness){
		"deleted": func(h *harness) {
			h.must(h.kill("", 9))
			h.wait("")
			h.must(second(h.delete("")))
			h.must(second(h.Service.Shutdown(h.Context(), &taskapi.ShutdownRequest{ID: cid})))
		},
		"crashed, then deleted": func(h *harness) {
			h.launcher.Last().Crash("guest panicked")
			h.wait("")
			h.must(second(h.delete("")))
		},
		"hung up": func(h *harness) {
			h.launcher.Last().HangUp()
			h.wait("")
			h.must(second(h.delete("")))
		},
		"closed": func(h *harness) {
			ctx, cancel := context.WithTimeout(h.Context(), 20*time.Second)
			defer cancel()
			h.must(h.pod.Close(ctx))
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.network.attach = func(context.Context) (*pod.Attachment, error) { return h.attached(nil), nil }
			h.run("sleep")
			if h.network.released != 0 {
				t.Error("released before the end")
			}
			end(h)
			h.network.ended(name)
			if !h.podState().Undone {
				t.Errorf("record %+v", h.podState())
			}
		})
	}
}

// A container that the guest refuses leaves the pod without a machine, and with one end of its place.
func TestReleaseAfterARefusal(t *testing.T) {
	h := newHarness(t)
	h.launcher.Hostile = hostile.Text
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return h.attached(nil), nil }
	h.spec("sleep")
	if _, err := h.Service.Create(t.Context(), h.createRequest()); err == nil {
		t.Error("created")
	}
	h.network.ended("refused")
}

// A place that can't be given back is in the record, for whoever comes next.
func TestReleaseFails(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.network.refuse = errors.New("somebody changes the network")
	h.must(h.kill("", 9))
	h.wait("")
	h.must(second(h.delete("")))
	if s := h.podState(); s.Undone || s.MachineDir == "" {
		t.Errorf("record %+v", s)
	}
	// The next machine of this pod's, here in the same shim.
	h.network.refuse = nil
	h.run("sleep")
	if h.network.released != 1 || len(h.network.asked) != 2 {
		t.Errorf("released %d times, asked %d times", h.network.released, len(h.network.asked))
	}
}

// A pod without a network has a machine without one, whoever wanted it so.
func TestNoNetwork(t *testing.T) {
	h := newHarness(t)
	s := newSpec("sleep")
	s.Annotations = map[string]string{"io.cube.network": "none"}
	h.writeSpec(s)
	h.must(second(h.Service.Create(t.Context(), h.createRequest())))
	if m := h.launcher.Last(); m.Request.Tap != nil || m.Guest.Identity().Network != nil {
		t.Errorf("tap %v, network %v", m.Request.Tap, m.Guest.Identity().Network)
	}
	if len(h.network.asked) != 1 || !h.network.asked[0].None {
		t.Errorf("asked %+v", h.network.asked)
	}
}

// What the annotation says wrong is named, before anything is made.
func TestBadNetworkAnnotation(t *testing.T) {
	h := newHarness(t)
	for value, want := range map[string]string{
		"":                                "none",
		"host":                            "none",
		`{"policy": {}}`:                  "policy: default is missing",
		`{"polcy": {"default": "allow"}}`: "polcy",
	} {
		s := newSpec("sleep")
		s.Annotations = map[string]string{"io.cube.network": value}
		h.writeSpec(s)
		_, err := h.Service.Create(t.Context(), h.createRequest())
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "io.cube.network") || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", value, err)
		}
	}
	if len(h.network.asked) > 0 || len(h.launcher.All()) > 0 {
		t.Errorf("asked %v, %d machines", h.network.asked, len(h.launcher.All()))
	}
}

// A machine isn't made without the network that it was to have, and neither the tap nor the place is kept for one that
// couldn't be made.
func TestNetworkFails(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return nil, errors.New("no tap is left") }
	h.must(h.pod.Reserve(spec.Common{}))
	_, err := h.pod.StartMachine(ctx, small)
	if err == nil || !strings.Contains(err.Error(), "attach the pod to the network: no tap is left") || len(h.launcher.All()) != 0 {
		t.Errorf("%d machines, %v", len(h.launcher.All()), err)
	}
	h.network.ended("not attached")
	h.network.released = 0
	place := h.attached(nil)
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return place, nil }
	h.launcher.Fail = errors.New("no memory")
	if _, err := h.pod.StartMachine(ctx, small); err == nil || !closed(place.Tap) {
		t.Errorf("the tap's closed: %v; %v", closed(place.Tap), err)
	}
	h.network.ended("without a machine")
	if !h.podState().Undone {
		t.Errorf("record %+v", h.podState())
	}
	// A machine that is there, but whose guest doesn't take its identity.
	h.network.released, h.launcher.Fail = 0, nil
	h.launcher.Hostile = hostile.Die + "Configure"
	if _, err := h.pod.StartMachine(ctx, small); err == nil {
		t.Error("a machine")
	}
	h.network.ended("without an agent")
	if m := h.launcher.Last(); m.Request.Shape != (vmm.Shape{VCPUs: 1, MemoryMiB: 256}) || !m.Stopped() {
		t.Errorf("machine %+v", m.Request)
	}
}
