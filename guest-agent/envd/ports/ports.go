// Package ports lets those outside reach programs that listen on the sandbox's loopback only: their ports are listened on at
// the network card's address as well, and connections relayed. It follows the programs as they come, go and come again.
package ports

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
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
	// listeners tells the addresses that are listened on.
	listeners func() ([]netip.AddrPort, error)
}

// Run relays until ctx ends.
func (f *Forwarder) Run(ctx context.Context) {
	f.relays = map[uint16]*relay{}
	defer f.closeAll()
	stop := f.look()
	defer stop()
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

// look finds the way to see which addresses are listened on: by the kernel's tables where it has no inet_diag.
func (f *Forwarder) look() (stop func()) {
	d, err := newDiag()
	if err == nil {
		if _, err = d.listeners(); err == nil {
			f.listeners = d.listeners
			return d.close
		}
		d.close()
	}
	slog.Info("programs that listen are looked for in /proc", "error", err)
	f.listeners = listeners
	return func() {}
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
	all, err := f.listeners()
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
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}, false
	}
	defer unix.Close(fd)
	card, err := unix.NewIfreq(device)
	if err != nil || unix.IoctlIfreq(fd, unix.SIOCGIFADDR, card) != nil {
		return netip.Addr{}, false
	}
	a, err := card.Inet4Addr()
	if err != nil {
		return netip.Addr{}, false
	}
	return netip.AddrFrom4([4]byte(a)), true
}
