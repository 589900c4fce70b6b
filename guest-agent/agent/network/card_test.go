package network

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// newCard puts the test into a network namespace of its own, which ends with it, with a card that has a peer.
func newCard(t *testing.T) (*Card, *Config) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces take root")
	}
	runtime.LockOSThread() // and never unlocks: the thread ends with the test
	must(t, unix.Unshare(unix.CLONE_NEWNET))
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}))
	peer, err := netlink.LinkByName("peer")
	must(t, err)
	must(t, netlink.LinkSetUp(peer))
	c, err := Parse(sample())
	must(t, err)
	return NewCard("eth0"), c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eth0(t *testing.T) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName("eth0")
	must(t, err)
	return l
}

// check compares the card with what it should have.
func check(t *testing.T, c *Config) {
	t.Helper()
	l := eth0(t)
	if l.Attrs().Flags&net.FlagUp == 0 || l.Attrs().MTU != c.MTU {
		t.Errorf("flags %v, MTU %d", l.Attrs().Flags, l.Attrs().MTU)
	}
	addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
	must(t, err)
	if len(addrs) != 1 || addrs[0].IPNet.String() != c.Address.String() {
		t.Errorf("addresses %v, want %v only", addrs, c.Address)
	}
	routes, err := netlink.RouteGet(net.IPv4(8, 8, 8, 8))
	must(t, err)
	if len(routes) != 1 || !routes[0].Gw.Equal(c.Gateway.AsSlice()) || !routes[0].Src.Equal(c.Address.Addr().AsSlice()) {
		t.Errorf("routes %v, want one by %v", routes, c.Gateway)
	}
	n := neighbours(t)
	if got := n[c.Gateway]; got.State != netlink.NUD_PERMANENT || got.HardwareAddr.String() != c.GatewayMAC.String() {
		t.Errorf("neighbour %v", got)
	}
}

func neighbours(t *testing.T) map[netip.Addr]netlink.Neigh {
	t.Helper()
	list, err := netlink.NeighList(eth0(t).Attrs().Index, netlink.FAMILY_V4)
	must(t, err)
	m := map[netip.Addr]netlink.Neigh{}
	for _, n := range list {
		if n.State&netlink.NUD_NOARP == 0 {
			a, _ := netip.AddrFromSlice(n.IP.To4())
			m[a] = n
		}
	}
	return m
}

var other = netip.MustParseAddr("169.254.68.7")

// learn makes the card know another neighbour, as if that had answered.
func learn(t *testing.T) {
	t.Helper()
	must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: eth0(t).Attrs().Index, Family: netlink.FAMILY_V4, State: netlink.NUD_REACHABLE,
		IP: other.AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}))
}

func knows(t *testing.T) bool {
	t.Helper()
	_, ok := neighbours(t)[other]
	return ok
}

func TestCard(t *testing.T) {
	card, c := newCard(t)
	if card.ResolvConf() != nil {
		t.Error("there is a resolv.conf without a network")
	}
	must(t, card.Configure(c, true))
	check(t, c)
	if got := string(card.ResolvConf()); got != string(resolvConf(c.Nameservers)) {
		t.Errorf("resolv.conf %q", got)
	}

	// While containers run, only what is different changes.
	learn(t)
	changed := *c
	changed.MTU, changed.GatewayMAC = 1300, net.HardwareAddr{2, 0, 0, 0, 0, 3}
	must(t, card.Configure(&changed, false))
	check(t, &changed)
	if !knows(t) {
		t.Error("the card went down for another MTU")
	}

	// After a restore nothing of what was known counts.
	must(t, card.Configure(&changed, true))
	check(t, &changed)
	if knows(t) {
		t.Error("a restored guest knows its old neighbours")
	}

	// Another address takes the place of the first.
	moved := changed
	moved.Address, moved.Gateway = netip.MustParsePrefix("10.1.2.3/32"), netip.MustParseAddr("10.9.9.9")
	must(t, card.Configure(&moved, false))
	check(t, &moved)

	must(t, card.Configure(nil, false))
	if l := eth0(t); l.Attrs().Flags&net.FlagUp != 0 {
		t.Error("the card is up without a network")
	}
	if card.ResolvConf() != nil {
		t.Error("a resolv.conf is left")
	}
	must(t, card.Configure(c, false))
	check(t, c)
}

// A network that the kernel doesn't take is an error that says which part, and doesn't count as one.
func TestRefused(t *testing.T) {
	card, c := newCard(t)
	bad := *c
	bad.GatewayMAC = c.GatewayMAC[:5]
	if err := card.Configure(&bad, true); !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "eth0: set its gateway's MAC") || card.ResolvConf() != nil {
		t.Errorf("got %v", err)
	}
	must(t, card.Configure(nil, false))
	if addrs, err := netlink.AddrList(eth0(t), netlink.FAMILY_V4); err != nil || len(addrs) != 0 || eth0(t).Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("addresses %v, %v, flags %v", addrs, err, eth0(t).Attrs().Flags)
	}
	must(t, card.Configure(c, false))
	check(t, c)
}

func TestNoCard(t *testing.T) {
	_, c := newCard(t)
	card := NewCard("eth1")
	if err := card.Configure(nil, true); err != nil {
		t.Error(err)
	}
	if err := card.Configure(c, true); err == nil || card.ResolvConf() != nil {
		t.Errorf("a card that isn't there was configured: %v", err)
	}
}
