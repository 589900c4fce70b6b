package gateway

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Up makes what Check finds nothing wrong with, twice, and Down leaves the host as it was.
func TestUpDown(t *testing.T) {
	for _, tc := range []struct {
		name             string
		forward          string
		acceptRedirects  string
		forwardingDevice string
	}{
		{name: "host that forwards", forward: "1", acceptRedirects: "0"},
		{name: "host that doesn't", forward: "0", acceptRedirects: "1"},
		{name: "host that doesn't, hardened, but for one device", forward: "0", acceptRedirects: "0", forwardingDevice: "up0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t)
			must(t, setSysctl(ipForward, tc.forward))
			must(t, setSysctl(acceptRedirects, tc.acceptRedirects))
			if tc.forwardingDevice != "" {
				must(t, setSysctl(forwardingOf(tc.forwardingDevice), "1"))
			}
			others(t, nftables.TableFamilyIPv4, "theirs", nftables.ChainPolicyAccept)
			before := snapshot(t)
			g := h.up()
			if f := h.found(Broken, Blocked); len(f) > 0 {
				t.Errorf("found %+v", f)
			}
			up := snapshot(t)
			if again := h.up(); again.Index != g.Index || again.MTU != g.MTU {
				t.Errorf("device %d after a second Up, %d before", again.Index, g.Index)
			}
			same(t, up, snapshot(t)) // handles too: nothing has been made again
			h.down()
			same(t, before, snapshot(t))
			h.down()
			if _, err := os.Stat(h.cfg.NetworkDir()); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", h.cfg.NetworkDir(), err)
			}
		})
	}
}

// An Up that fails on a host that had none leaves it as it was.
func TestUpFails(t *testing.T) {
	for _, tc := range []struct {
		name, err string
		prepare   func(h *host)
	}{
		{"pool is a device's address", `overlaps with the address 10.200.7.1/24 of device up0: set network.pool`, func(h *host) {
			address4(h.t, "up0", "10.200.7.1/24")
		}},
		{"pool is within a route", `overlaps with the route 10.0.0.0/8 via 198.51.100.7 dev up0`, func(h *host) {
			must(h.t, netlink.RouteAdd(&netlink.Route{Dst: network("10.0.0.0/8"), Gw: net.ParseIP("198.51.100.7")}))
		}},
		{"a route of another table is within the pool", `overlaps with the route 10.200.3.0/24 via 198.51.100.7 dev up0 table 77`, func(h *host) {
			must(h.t, netlink.RouteAdd(&netlink.Route{Dst: network("10.200.3.0/24"), Gw: net.ParseIP("198.51.100.7"), Table: 77}))
		}},
		{"pool is unreachable", `overlaps with the route 10.192.0.0/10`, func(h *host) {
			must(h.t, netlink.RouteAdd(&netlink.Route{Dst: network("10.192.0.0/10"), Type: unix.RTN_UNREACHABLE}))
		}},
		{"device of somebody else's", "set network.device", func(h *host) {
			must(h.t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: h.cfg.Network.Device}, PeerName: "theirs"}))
		}},
		{"table of somebody else's", "set network.nft_table", func(h *host) {
			others(h.t, nftables.TableFamilyINet, h.cfg.Network.NFTable, nftables.ChainPolicyAccept)
		}},
		{"routing table of somebody else's", "has a route of somebody else's, 192.0.2.0/24 via 198.51.100.7 dev up0 table 3262: set network.route_table", func(h *host) {
			must(h.t, netlink.RouteAdd(&netlink.Route{Dst: network("192.0.2.0/24"), Gw: net.ParseIP("198.51.100.7"), Table: h.cfg.Network.RouteTable}))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t)
			must(t, setSysctl(ipForward, "0"))
			tc.prepare(h)
			before := snapshot(t)
			if _, err := Up(t.Context(), h.cfg); err == nil || !strings.Contains(err.Error(), tc.err) || !errdefs.IsAlreadyExists(err) && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("Up: %v, want %q", err, tc.err)
			}
			same(t, before, snapshot(t))
			if _, err := os.Stat(h.cfg.NetworkDir()); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", h.cfg.NetworkDir(), err)
			}
		})
	}
}

// A VPN that takes the default route in halves is none that the pool overlaps with.
func TestHalvesOfTheDefaultRoute(t *testing.T) {
	h := newHost(t)
	for _, half := range []string{"0.0.0.0/1", "128.0.0.0/1", "8.0.0.0/7"} {
		must(t, netlink.RouteAdd(&netlink.Route{Dst: network(half), Gw: net.ParseIP("198.51.100.7")}))
	}
	h.up()
	h.down()
}

// What somebody takes away or changes is found, and made right by Up, and by Repair where it is no other configuration.
func TestRepair(t *testing.T) {
	for _, tc := range []struct {
		name, found string
		change      func(h *host, l netlink.Link)
	}{
		{"device", "device cube-gw is missing", func(h *host, l netlink.Link) { must(h.t, netlink.LinkDel(l)) }},
		{"device down", "is down", func(h *host, l netlink.Link) { must(h.t, netlink.LinkSetDown(l)) }},
		{"peer down", "has no carrier: cube-gw-peer is down", func(h *host, l netlink.Link) {
			must(h.t, netlink.LinkSetDown(link(h.t, "cube-gw-peer")))
		}},
		{"peer moved away", "has lost its peer", func(h *host, l netlink.Link) {
			must(h.t, netlink.LinkSetNsFd(link(h.t, "cube-gw-peer"), int(h.internet)))
		}},
		{"ARP", "speaks ARP", func(h *host, l netlink.Link) { must(h.t, netlink.LinkSetARPOn(l)) }},
		{"MAC", "has the MAC address", func(h *host, l netlink.Link) {
			must(h.t, netlink.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 9}))
		}},
		{"MTU", "has an MTU of 1400, the uplink 1500", func(h *host, l netlink.Link) { must(h.t, netlink.LinkSetMTU(l, 1400)) }},
		{"address", "hasn't the address 10.200.255.254", func(h *host, l netlink.Link) {
			must(h.t, netlink.AddrDel(l, gatewayAddr(&h.cfg.Network)))
		}},
		{"route", "has no route of 10.200.0.0/16", func(h *host, l netlink.Link) {
			must(h.t, netlink.RouteDel(poolRoute(&h.cfg.Network, l.Attrs().Index)))
		}},
		{"sysctl", "rp_filter is \"0\" and not 1", func(h *host, l netlink.Link) { must(h.t, setSysctl("ipv4/conf/cube-gw/rp_filter", "0")) }},
		{"ip_forward", "somebody has turned it off", func(h *host, l netlink.Link) { must(h.t, setSysctl(ipForward, "0")) }},
		{"routing rule of the proxy", "the routing rule with priority 1000 for the egress proxy is missing", func(h *host, l netlink.Link) { must(h.t, netlink.RuleDel(proxyRule(&h.cfg.Network))) }},
		{"routing rule of the forwarder", "the routing rule with priority 1000 for the DNS forwarder is missing", func(h *host, l netlink.Link) {
			must(h.t, netlink.RuleDel(resolverRule(&h.cfg.Network)))
		}},
		{"proxy's route", "the route in table 3262", func(h *host, l netlink.Link) {
			must(h.t, netlink.RouteDel(proxyRoute(&h.cfg.Network, link(h.t, "lo").Attrs().Index)))
		}},
		{"table", "nftables table inet cube is missing", func(h *host, l netlink.Link) { must(h.t, uninstall("cube")) }},
		{"a rule less", "nftables table inet cube has been changed", func(h *host, l netlink.Link) {
			c, err := nftables.New()
			must(h.t, err)
			c.FlushChain(&nftables.Chain{Name: "forward", Table: &nftables.Table{Name: "cube", Family: nftables.TableFamilyINet}})
			must(h.t, c.Flush())
		}},
		{"a rule more", "nftables table inet cube has been changed", func(h *host, l netlink.Link) {
			c, err := nftables.New()
			must(h.t, err)
			table := &nftables.Table{Name: "cube", Family: nftables.TableFamilyINet}
			c.InsertRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Name: "from-sandboxes", Table: table}, Exprs: rules(accept())})
			must(h.t, c.Flush())
		}},
		{"a set of another kind", "nftables table inet cube has been changed", func(h *host, l netlink.Link) {
			c, err := nftables.New()
			must(h.t, err)
			must(h.t, c.AddSet(&nftables.Set{Table: &nftables.Table{Name: "cube", Family: nftables.TableFamilyINet}, Name: "more", KeyType: nftables.TypeIPAddr}, nil))
			must(h.t, c.Flush())
		}},
		{"another configuration of the same", "nftables table inet cube is of another configuration", func(h *host, l netlink.Link) { h.cfg.Network.DNSPort = 5300 }},
		{"another configuration", "has another configuration", func(h *host, l netlink.Link) {
			h.cfg.Network.Pool, h.cfg.Network.Device, h.cfg.Network.RouteTable = netip.MustParsePrefix("10.201.0.0/20"), "cube2", 99
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t)
			before := snapshot(t)
			g := h.up()
			tc.change(h, link(t, h.cfg.Network.Device))
			if f := h.found(Broken); !slices.ContainsFunc(f, func(f Finding) bool { return strings.Contains(f.Detail, tc.found) }) {
				t.Errorf("found %+v, want %q", f, tc.found)
			}
			was, err := g.Repair(t.Context())
			must(t, err)
			if tc.name == "another configuration" {
				if len(was) > 0 {
					t.Errorf("repaired %q", was)
				}
				h.up()
			} else {
				if !slices.ContainsFunc(was, func(was string) bool { return strings.Contains(was, tc.found) }) {
					t.Errorf("repaired %q, want %q", was, tc.found)
				}
				if l := link(t, h.cfg.Network.Device); g.Index != l.Attrs().Index {
					t.Errorf("device %d after Repair, not %d", g.Index, l.Attrs().Index)
				}
				if again, err := g.Repair(t.Context()); err != nil || len(again) > 0 {
					t.Errorf("repaired again: %q, %v", again, err)
				}
			}
			if f := h.found(Broken, Blocked); len(f) > 0 {
				t.Errorf("found %+v when it was repaired", f)
			}
			h.down()
			if was, err := g.Repair(t.Context()); err != nil || len(was) > 0 {
				t.Errorf("repaired %q after Down, %v", was, err)
			}
			must(t, setSysctl(ipForward, "1")) // as it was, for those who have turned it off
			same(t, before, snapshot(t))
		})
	}
}

// A device that somebody has put into a bridge comes out of it.
func TestBridged(t *testing.T) {
	h := newHost(t)
	g := h.up()
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "theirs"}}))
	must(t, netlink.LinkSetMaster(link(t, h.cfg.Network.Device), link(t, "theirs")))
	if was, err := g.Repair(t.Context()); err != nil || len(was) != 1 || !strings.Contains(was[0], "is part of another device") {
		t.Errorf("repaired %q, %v", was, err)
	}
	if f := h.found(Broken); len(f) > 0 {
		t.Errorf("found %+v", f)
	}
}

// An Up that ended at any step is completed by the next, or taken away by Down.
func TestInterrupted(t *testing.T) {
	for _, finish := range []string{"up", "down"} {
		t.Run(finish, func(t *testing.T) {
			h := newHost(t)
			must(t, setSysctl(ipForward, "0"))
			before := snapshot(t)
			h.up()
			rec, err := readRecord(h.cfg.NetworkDir())
			must(t, err)
			// As it is before the rules are in the record, and the device in the kernel.
			rec.Ruleset, rec.InForce = "", ""
			must(t, rec.write(h.cfg.NetworkDir()))
			must(t, netlink.LinkDel(link(t, h.cfg.Network.Device)))
			if finish == "up" {
				h.up()
				if f := h.found(Broken, Blocked); len(f) > 0 {
					t.Errorf("found %+v", f)
				}
			}
			h.down()
			same(t, before, snapshot(t))
		})
	}
}

func TestDamagedRecord(t *testing.T) {
	h := newHost(t)
	h.up()
	f := filepath.Join(h.cfg.NetworkDir(), "gateway.json")
	must(t, os.WriteFile(f, []byte("{"), 0o600))
	for name, err := range map[string]error{
		"Down":  Down(t.Context(), h.cfg),
		"Check": func() error { _, err := Check(t.Context(), h.cfg); return err }(),
		"Up":    func() error { _, err := Up(t.Context(), h.cfg); return err }(),
	} {
		if err == nil || !strings.Contains(err.Error(), f) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The device's MTU is the uplink's, also when that changes or another device becomes it.
func TestMTU(t *testing.T) {
	h := newHost(t)
	g := h.up()
	if g.MTU != 1500 {
		t.Fatalf("MTU %d", g.MTU)
	}
	ctx, cancel := context.WithCancel(t.Context())
	changed, ended := make(chan int, 16), make(chan error, 1)
	go func() { ended <- g.Watch(ctx, func(up Uplink) { changed <- up.MTU }) }()
	expect := func(mtu int) {
		t.Helper()
		deadline := time.After(wait)
		for {
			select {
			case got := <-changed:
				if got != mtu {
					continue
				}
			case <-deadline:
				t.Fatalf("the MTU isn't %d", mtu)
			}
			break
		}
		for _, name := range []string{"cube-gw", "cube-gw-peer"} {
			if a := link(t, name).Attrs(); a.MTU != mtu {
				t.Errorf("%s has an MTU of %d", name, a.MTU)
			}
		}
	}
	must(t, netlink.LinkSetMTU(link(t, "up0"), 1400))
	expect(1400)
	veth(t, h.ns, "up1", net.HardwareAddr{2, 0, 0, 0, 3, 1}, "192.0.2.2/24", h.internet, "eth1", net.HardwareAddr{2, 0, 0, 0, 3, 2}, "192.0.2.1/24")
	must(t, netlink.LinkSetMTU(link(t, "up1"), 1300))
	must(t, netlink.RouteDel(&netlink.Route{Gw: net.ParseIP("198.51.100.1")}))
	expect(1500) // no uplink
	must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("198.51.100.1"), Priority: 200}))
	expect(1400)
	must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("192.0.2.1"), Priority: 100}))
	expect(1300)
	if f := h.found(Broken); len(f) > 0 {
		t.Errorf("found %+v", f)
	}
	cancel()
	select {
	case err := <-ended:
		must(t, err)
	case <-time.After(wait):
		t.Fatal("Watch doesn't end")
	}
	must(t, g.Close())
}

func network(s string) *net.IPNet { return ipNet(netip.MustParsePrefix(s)) }

func link(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must(t, err)
	return l
}
