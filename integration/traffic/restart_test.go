package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/integration/testhost"
)

// TestRestart: whatever becomes of the daemon, what is open stays open in both directions, opened from either side, and what
// is closed stays closed, while two boxes try without pause to get through.
func TestRestart(t *testing.T) {
	flags := policed(fmt.Sprintf("%s:%d/tcp", testhost.Server, talkPort), fmt.Sprintf("%s:%d/udp", testhost.Server, testhost.EchoPort))
	a, b := newBox(t, "a", flags...), newBox(t, "b", flags...)
	internet := listenForTalks(t)
	control := internet.call(t, "the router", s.Host.Router)
	wire := []*watch{watchDevice(t, "the wire", s.Host.Namespace, device(t, testhost.UplinkDevice).Attrs().Index, true, allowedOut)}
	var talks []*talk
	for box, other := range map[*box]*box{a: b, b: a} {
		wire = append(wire, watchDevice(t, "to "+box.id, s.Host.Namespace, device(t, box.place.Tap).Attrs().Index, true, allowedIn))
		out, in := internet.talkWith(t, box, denied(other)...)
		talks = append(talks, out, in)
	}
	goOn(t, append(talks, control)...)
	judge(t, "before", control, talks...)
	for _, step := range []struct {
		name string
		do   func(t *testing.T)
		runs bool
	}{
		{"killed", func(t *testing.T) { s.End(t, up(), unix.SIGKILL) }, false},
		{"started after the kill", func(t *testing.T) { cube(t, "up", "-d") }, true},
		{"stopped", func(t *testing.T) { s.End(t, up(), unix.SIGTERM) }, false},
		{"started again", func(t *testing.T) { cube(t, "up", "-d") }, true},
	} {
		before := attached(t, a, b)
		tried := drops(t, a, b)
		step.do(t)
		goOn(t, append(talks, control)...)
		judge(t, step.name, control, talks...)
		for _, w := range wire {
			w.look(t, step.name)
		}
		if now := drops(t, a, b); now <= tried {
			t.Errorf("%s: nothing was denied, of all that was tried", step.name)
		}
		after := attached(t, a, b)
		for i := range before {
			switch was, is := before[i], after[i]; {
			case step.runs && was.program == is.program:
				t.Errorf("%s: a hook still runs program %d: the daemon brings its own", step.name, is.program)
			case !step.runs && was != is:
				t.Errorf("%s: a hook had %+v and has %+v", step.name, was, is)
			case was.link != is.link:
				t.Errorf("%s: a hook had link %d and has %d: it was closed meanwhile, or open", step.name, was.link, is.link)
			}
		}
	}
}

// denied are places that no policy opens, and some that only the boxes' own doesn't.
func denied(other *box) []netip.AddrPort {
	places := []netip.AddrPort{
		netip.AddrPortFrom(testhost.Server, testhost.DataPort),
		netip.AddrPortFrom(testhost.Server, boxPort),
		netip.AddrPortFrom(testhost.Narrow, talkPort),
		netip.AddrPortFrom(other.place.Address, boxPort),
		netip.AddrPortFrom(other.place.Address.Next(), boxPort),
		netip.AddrPortFrom(s.Config.Network.Gateway(), s.Config.Network.DNSPort),
		netip.MustParseAddrPort("169.254.169.254:80"),
	}
	for _, a := range append([]netip.Addr{testhost.Uplink, testhost.Router}, testhost.Neighbours...) {
		places = append(places, netip.AddrPortFrom(a, talkPort))
	}
	return places
}

// drops are the boxes' packets that didn't get through.
func drops(t *testing.T, boxes ...*box) (n uint64) {
	t.Helper()
	for _, b := range boxes {
		c := b.counters(t)
		n += c[bpf.Policy].Packets + c[bpf.HardDeny].Packets
	}
	return n
}

// hook is what a direction of a device runs.
type hook struct {
	program ebpf.ProgramID
	link    link.ID // 0 where there are no links, but filters
}

// attached are the hooks of the boxes' taps and of the gateway device.
func attached(t *testing.T, boxes ...*box) (hooks []hook) {
	t.Helper()
	gateway := device(t, s.Config.Network.Device).Attrs().Index
	must(t, s.Host.Do(func() error {
		for _, b := range boxes {
			tap, err := netlink.LinkByName(b.place.Tap)
			if err != nil {
				return err
			}
			for _, way := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				h, err := hookOf(tap.Attrs().Index, way)
				if err != nil {
					return err
				}
				hooks = append(hooks, h)
			}
		}
		h, err := hookOf(gateway, ebpf.AttachTCXEgress)
		hooks = append(hooks, h)
		return err
	}))
	if slices.Contains(hooks, hook{}) {
		t.Fatalf("a hook runs nothing: %+v", hooks)
	}
	return hooks
}

func hookOf(device int, way ebpf.AttachType) (hook, error) {
	found, err := link.QueryPrograms(link.QueryOptions{Target: device, Attach: way})
	if errors.Is(err, ebpf.ErrNotSupported) || err == nil && len(found.Programs) == 0 {
		return filterOf(device, way)
	} else if err != nil {
		return hook{}, err
	}
	id, _ := found.Programs[0].LinkID()
	return hook{found.Programs[0].ID, id}, nil
}

// filterOf is for kernels without TCX.
func filterOf(device int, way ebpf.AttachType) (hook, error) {
	l, err := netlink.LinkByIndex(device)
	if err != nil {
		return hook{}, err
	}
	parent := uint32(netlink.HANDLE_MIN_INGRESS)
	if way == ebpf.AttachTCXEgress {
		parent = netlink.HANDLE_MIN_EGRESS
	}
	filters, err := netlink.FilterList(l, parent)
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			return hook{program: ebpf.ProgramID(b.Id)}, nil
		}
	}
	return hook{}, err
}
