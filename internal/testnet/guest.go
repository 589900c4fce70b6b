package testnet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/network"
)

// Guest is a network namespace in the place of a machine: its card is at the other end of a sandbox's tap, and has the address
// that all guests have.
type Guest struct {
	ns *os.File
}

// Guest starts one at the tap that a pod has claimed. It ends with the test, or when stop is called.
func (h *Host) Guest(pod network.Pod) (g *Guest, stop func()) {
	h.t.Helper()
	tap, err := h.OpenTap(h.t.Context(), pod)
	Must(h.t, err)
	g = &Guest{}
	var card *os.File
	if err := onThread(func() (err error) {
		card, err = g.boot()
		return err
	}); err != nil {
		h.t.Fatal(errors.Join(err, tap.Close()))
	}
	var both sync.WaitGroup
	both.Go(func() { pump(card, tap) })
	both.Go(func() { pump(tap, card) })
	stop = sync.OnceFunc(func() {
		_ = errors.Join(tap.Close(), card.Close(), g.ns.Close())
		both.Wait()
	})
	h.t.Cleanup(stop)
	return g, stop
}

// boot makes the namespace of the calling thread, and returns what is the machine's end of its card.
func (g *Guest) boot() (card *os.File, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("make the guest's namespace: %w", err)
	}
	if g.ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, err
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	ifr, err := unix.NewIfreq("eth0")
	if err != nil {
		return nil, err
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return nil, errors.Join(fmt.Errorf("make the guest's card: %w", err), unix.Close(fd))
	}
	card = os.NewFile(uintptr(fd), "eth0")
	return card, setUp()
}

// setUp has the calling thread's namespace be a guest's.
func setUp() error {
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	p := network.GuestPrefix
	addr := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
	return errors.Join(
		os.WriteFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", []byte("1"), 0),
		netlink.LinkSetHardwareAddr(l, network.GuestMAC),
		netlink.AddrAdd(l, &netlink.Addr{IPNet: addr}),
		netlink.LinkSetUp(l),
		netlink.RouteAdd(&netlink.Route{Gw: network.GuestGateway.AsSlice()}),
	)
}

// Do calls f in the guest. Sockets that it makes stay there.
func (g *Guest) Do(t *testing.T, f func() error) {
	t.Helper()
	Must(t, onThread(func() error {
		if err := unix.Setns(int(g.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	}))
}

// onThread calls f on a thread that ends with it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread is spoilt
		done <- f()
	}()
	return <-done
}

// pump passes frames on, with their vnet headers, until one of the ends is closed.
func pump(to, from *os.File) {
	b := make([]byte, 1<<17)
	for {
		n, err := from.Read(b)
		if err != nil {
			return // closed, or the device is gone
		}
		_, _ = to.Write(b[:n]) // what isn't taken is lost, as on any wire
	}
}
