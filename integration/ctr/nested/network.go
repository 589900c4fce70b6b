package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

var (
	bridge   = netip.MustParsePrefix("198.51.100.1/24") // of the inner container
	inner    = netip.MustParsePrefix("198.51.100.2/24")
	uplink   = netip.MustParsePrefix("203.0.113.1/24") // towards the rest of the world
	outside  = netip.MustParsePrefix("203.0.113.2/24")
	answerer = netip.AddrPortFrom(outside.Addr(), 7)
)

// anyPort is a struct nf_nat_ipv4_multi_range_compat (linux/netfilter/nf_nat.h) with one range, which limits nothing. In the
// library's own type for it some fields have 8 bytes instead of 4.
var anyPort = xt.Unknown(append(binary.NativeEndian.AppendUint32(nil, 1), make([]byte, 16)...))

// wait bounds one datagram's way in an emulated machine on a loaded host.
const wait = 20 * time.Second

// network gives a network namespace a card in a bridge and lets it reach another one, as whoever its host is: by a rule of
// nftables, and by one of iptables as the iptables command writes it for nftables.
func network() error {
	host, err := netns.Get()
	if err != nil {
		return err
	}
	container, err := newNamespace(host)
	if err != nil {
		return err
	}
	world, err := newNamespace(host)
	if err != nil {
		return err
	}
	br := &netlink.Bridge{LinkAttrs: named("br0")}
	if err := netlink.LinkAdd(br); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	if err := configure(nil, br, bridge); err != nil {
		return err
	}
	port, err := pair("port", container, inner, bridge)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetMaster(port, br); err != nil {
		return fmt.Errorf("port of the bridge: %w", err)
	}
	out, err := pair("uplink", world, outside, netip.Prefix{})
	if err != nil {
		return err
	}
	if err := configure(nil, out, uplink); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	for name, verdict := range map[string][]expr.Any{
		"nftables": {&expr.Masq{}},
		"iptables": {
			&expr.Match{Name: "addrtype", Rev: 1, Info: &xt.AddrTypeV1{Source: uint16(xt.AddrTypeUnicast)}},
			&expr.Target{Name: "MASQUERADE", Info: &anyPort},
		},
	} {
		if err := masquerade(name, verdict); err != nil {
			return fmt.Errorf("rule of %s: %w", name, err)
		}
		from, err := reach(host, container, world)
		if err != nil {
			return fmt.Errorf("with a rule of %s: %w", name, err)
		}
		if from != uplink.Addr() {
			return fmt.Errorf("with a rule of %s the world sees %s, not %s", name, from, uplink.Addr())
		}
	}
	return nil
}

func named(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

// newNamespace makes a network namespace and goes back to where the thread was.
func newNamespace(back netns.NsHandle) (netns.NsHandle, error) {
	ns, err := netns.New()
	if err != nil {
		return ns, fmt.Errorf("network namespace: %w", err)
	}
	return ns, netns.Set(back)
}

// pair makes two cards, of which the other is in a namespace and has an address and, if there is one, a gateway.
func pair(name string, ns netns.NsHandle, address, gateway netip.Prefix) (netlink.Link, error) {
	v := &netlink.Veth{LinkAttrs: named(name), PeerName: "eth0", PeerNamespace: netlink.NsFd(ns)}
	if err := netlink.LinkAdd(v); err != nil {
		return nil, fmt.Errorf("pair of cards: %w", err)
	}
	if err := netlink.LinkSetUp(v); err != nil {
		return nil, err
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE) // the library would ask for IPsec, too
	if err != nil {
		return nil, err
	}
	defer h.Close()
	peer, err := h.LinkByName("eth0")
	if err != nil {
		return nil, err
	}
	if err := configure(h, peer, address); err != nil || !gateway.IsValid() {
		return v, err
	}
	_, everywhere, _ := net.ParseCIDR("0.0.0.0/0")
	return v, h.RouteAdd(&netlink.Route{LinkIndex: peer.Attrs().Index, Dst: everywhere, Gw: gateway.Addr().AsSlice()})
}

// configure gives a card an address and brings it up. Without a handle it is one of the thread's namespace.
func configure(h *netlink.Handle, l netlink.Link, address netip.Prefix) error {
	add, up := netlink.AddrAdd, netlink.LinkSetUp
	if h != nil {
		add, up = h.AddrAdd, h.LinkSetUp
	}
	a := &netlink.Addr{IPNet: &net.IPNet{IP: address.Addr().AsSlice(), Mask: net.CIDRMask(address.Bits(), 32)}}
	if err := errors.Join(add(l, a), up(l)); err != nil {
		return fmt.Errorf("address of %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// masquerade makes a table's only rule, in place of what the table had. It has the name of iptables' table, by which the
// kernel tells what its targets are for.
func masquerade(name string, verdict []expr.Any) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Name: "nat", Family: nftables.TableFamilyIPv4})
	c.DelTable(table)
	table = c.AddTable(table)
	chain := c.AddChain(&nftables.Chain{
		Name: "POSTROUTING", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: verdict, UserData: []byte(name)})
	return c.Flush()
}

// reach sends a datagram from one namespace to the other and says who the other takes for its sender. It goes back to
// the thread's namespace.
func reach(back, from, to netns.NsHandle) (netip.Addr, error) {
	defer func() { _ = netns.Set(back) }()
	if err := netns.Set(to); err != nil {
		return netip.Addr{}, err
	}
	l, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(answerer))
	if err != nil {
		return netip.Addr{}, err
	}
	defer l.Close()
	if err := netns.Set(from); err != nil {
		return netip.Addr{}, err
	}
	c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(answerer))
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		return netip.Addr{}, err
	}
	if err := l.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return netip.Addr{}, err
	}
	_, sender, err := l.ReadFromUDPAddrPort(make([]byte, 16))
	return sender.Addr(), err
}
