package testhost

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace. It has no name: it goes with the last descriptor, socket or process in it.
type Namespace struct {
	file *os.File
}

// NewNamespace makes one whose loopback is up. IPv6 is off, as its addresses and routes come when they like.
func NewNamespace() (*Namespace, error) {
	n := &Namespace{}
	return n, onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		if n.file, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		for _, key := range []string{"all", "default"} {
			if err := Sysctl("ipv6/conf/"+key+"/disable_ipv6", "1"); err != nil {
				return err
			}
		}
		return up("lo")
	})
}

// onThread calls do on a thread that ends with it.
func onThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread is spoilt
		err := errors.New("the call on another thread has not returned")
		defer func() { done <- err }() // runtime.Goexit, by which a test fails, too
		err = do()
	}()
	return <-done
}

// Do calls f on a thread in the namespace. Sockets that it makes stay there; goroutines that it starts don't.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace: %w", err)
		}
		return f()
	})
}

// Command is exec.Command in the namespace. The process has the pid that the command's has.
func (n *Namespace) Command(name string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--net=" + n.Path(), "--", name}, args...)...)
}

// Path is a path of the namespace, good until Close.
func (n *Namespace) Path() string {
	return "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(int(n.file.Fd()))
}

// Listen is net.Listen in the namespace.
func (n *Namespace) Listen(network, address string) (l net.Listener, err error) {
	err = n.Do(func() (err error) {
		l, err = net.Listen(network, address)
		return err
	})
	return l, err
}

// Close lets go of the namespace.
func (n *Namespace) Close() error { return n.file.Close() }

// LargeSegmentsKey is the setting below /proc/sys/net of how many segments TCP makes one frame of at least, however slow it
// takes the way to be, and LargeSegmentsValue what fills frames of 64 KiB with an MTU of 1500.
const (
	LargeSegmentsKey   = "ipv4/tcp_min_tso_segs"
	LargeSegmentsValue = "44"
)

// LargeSegments has TCP of the calling thread's namespace send frames of 64 KiB.
func LargeSegments() error { return Sysctl(LargeSegmentsKey, LargeSegmentsValue) }

// Sysctl writes a setting below /proc/sys/net of the calling thread's namespace.
func Sysctl(key, value string) error {
	if err := os.WriteFile("/proc/sys/net/"+key, []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl: %w", err)
	}
	return nil
}

// up sets a device up and gives it addresses.
func up(name string, addresses ...string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look for device %s: %w", name, err)
	}
	for _, a := range addresses {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, addr); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, a, err)
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

// cable joins two namespaces by a pair of devices of the same MTU.
func cable(a *Namespace, nameA string, b *Namespace, nameB string, mtu int) error {
	return a.Do(func() error {
		err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: nameA, MTU: mtu}, PeerName: nameB, PeerNamespace: netlink.NsFd(int(b.file.Fd())),
		})
		if err != nil {
			return fmt.Errorf("make devices %s and %s: %w", nameA, nameB, err)
		}
		return nil
	})
}

// route adds a default route.
func route(gateway string) error {
	if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)}); err != nil {
		return fmt.Errorf("add the default route by %s: %w", gateway, err)
	}
	return nil
}
