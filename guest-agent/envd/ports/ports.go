// Package ports lets those outside reach programs that listen on the sandbox's loopback only: their ports are listened on at
// the network card's address as well, and connections relayed. It follows the programs as they come, go and come again.
package ports

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"time"
)

// interval is how long a program waits to be reached at most. The kernel tells when a socket is gone, but not when one begins
// to listen.
const interval = time.Second

// maxRelays bounds the ports.
const maxRelays = 512

var (
	loopback4 = netip.MustParseAddr("127.0.0.1")
	loopback6 = netip.MustParseAddr("::1")
)

// Forwarder relays the ports.
type Forwarder struct {
	// Device is the network card.
	Device string
	// Except is a port that isn't relayed.
	Except uint16

	address netip.Addr
	relays  map[uint16]*relay
}

// Run relays until ctx ends.
func (f *Forwarder) Run(ctx context.Context) {
	f.relays = map[uint16]*relay{}
	defer f.closeAll()
	ended, err := closed(ctx)
	if err != nil {
		slog.Info("ports that programs have left stay taken for a moment", "interval", interval.String(), "error", err)
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		f.scan(ctx)
		if !f.wait(ctx, tick.C, ended) {
			return
		}
	}
}

// wait waits until a scan is due, and says whether it is before ctx ends.
func (f *Forwarder) wait(ctx context.Context, tick <-chan time.Time, ended <-chan uint16) bool {
	for {
		select {
		case <-tick:
			return true
		case port, ok := <-ended:
			if !ok {
				ended = nil // the next scan is as good
				continue
			}
			if _, ours := f.relays[port]; ours || port == unknown {
				return true
			}
		case <-ctx.Done():
			return false
		}
	}
}

func (f *Forwarder) closeAll() {
	for port, r := range f.relays {
		r.close()
		delete(f.relays, port)
	}
}

// scan has a relay for each port that takes one, and no others.
func (f *Forwarder) scan(ctx context.Context) {
	address, ok := addressOf(f.Device)
	if !ok || address != f.address {
		f.closeAll()
		f.address = address
	}
	all, err := listeners()
	if !ok || err != nil {
		return
	}
	wanted := f.wanted(all)
	for port, r := range f.relays {
		if _, ok := wanted[port]; !ok || r.ended.Load() {
			r.close()
			delete(f.relays, port)
		}
	}
	for port, target := range wanted {
		if r, ok := f.relays[port]; ok {
			r.target.Store(&target)
			continue
		}
		if len(f.relays) >= maxRelays {
			return
		}
		r, err := newRelay(ctx, netip.AddrPortFrom(f.address, port), target)
		if err != nil { // somebody was faster
			slog.Debug("a port isn't relayed", "port", port, "error", err)
			continue
		}
		f.relays[port] = r
	}
}

// wanted are the ports that are only listened on at loopback, and where. A relay's own socket doesn't count.
func (f *Forwarder) wanted(all []netip.AddrPort) map[uint16]netip.AddrPort {
	wanted := map[uint16]netip.AddrPort{}
	for _, l := range all {
		other, there := wanted[l.Port()]
		switch {
		case l.Addr() == loopback4 && l.Port() != f.Except:
			wanted[l.Port()] = l
		case l.Addr() == loopback6 && l.Port() != f.Except && (!there || other.Addr() != loopback4):
			wanted[l.Port()] = l
		}
	}
	for _, l := range all {
		_, ours := f.relays[l.Port()]
		if l.Addr().IsUnspecified() || l.Addr() == f.address && !ours {
			delete(wanted, l.Port())
		}
	}
	return wanted
}

// addressOf is the first IPv4 address of a network card.
func addressOf(device string) (netip.Addr, bool) {
	card, err := net.InterfaceByName(device)
	if err != nil {
		return netip.Addr{}, false
	}
	all, err := card.Addrs()
	if err != nil {
		return netip.Addr{}, false
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			return p.Addr(), true
		}
	}
	return netip.Addr{}, false
}
