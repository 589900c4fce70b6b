package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/internal/undo"
)

// tapFlags are what QEMU takes.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// alias marks a device as a sandbox's tap.
const alias = "cube tap"

func validNumber(n int) bool { return n >= 1 && n <= bpf.MaxSandboxes }

func (n *Network) tapName(number int) string { return n.cfg.Network.TapPrefix + strconv.Itoa(number) }

// find returns nil where there is no such device.
func (s *session) find(name string) (netlink.Link, error) {
	l, err := s.links.LinkByName(name)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("look for device %s: %w", name, err)
	}
	return l, nil
}

// tap returns the tap of a number, with its programs in force; errdefs.ErrFailedPrecondition if it isn't so.
func (s *session) tap(number int) (netlink.Link, error) {
	name := s.tapName(number)
	l, err := s.find(name)
	if err != nil {
		return nil, err
	}
	if l == nil || l.Attrs().Alias != alias {
		return nil, fmt.Errorf("tap %s is gone: %w", name, errdefs.ErrFailedPrecondition)
	}
	if l.Attrs().RawFlags&unix.IFF_UP == 0 {
		return nil, fmt.Errorf("tap %s is down: %w", name, errdefs.ErrFailedPrecondition)
	}
	if err := s.datapath.CheckTap(l.Attrs().Index); err != nil {
		return nil, fmt.Errorf("tap %s: %w: %w", name, err, errdefs.ErrFailedPrecondition)
	}
	return l, nil
}

// reserve finds a number that no tap has.
func (s *session) reserve() (int, error) {
	names, err := s.names(tapsDir)
	if err != nil {
		return 0, err
	}
	taken := make(map[string]bool, len(names))
	for _, name := range names {
		taken[name] = true
	}
	for number := 1; validNumber(number); number++ {
		name := strconv.Itoa(number)
		if taken[name] {
			continue
		}
		if err := s.mark(tapsDir, name); err == nil {
			return number, nil
		} else if !errors.Is(err, fs.ErrExist) {
			return 0, fmt.Errorf("reserve tap %d: %w", number, err)
		}
	}
	return 0, fmt.Errorf("all %d taps are in use: %w", bpf.MaxSandboxes, errdefs.ErrResourceExhausted)
}

// makeTap makes the tap of a number that is reserved: closed, and up only when its programs are there. Of one that can't be
// made nothing is left; its number may be.
func (s *session) makeTap(number int) (_ netlink.Link, err error) {
	name := s.tapName(number)
	var u undo.Stack
	defer u.Run(&err)
	if err := create(name); err != nil {
		return nil, fmt.Errorf("make tap %s: %w; if that device is not Cube's, set network.tap_prefix to another name", name, err)
	}
	u.Push(func() error { return s.removeTap(number) })
	l, err := s.find(name)
	if err == nil && l == nil {
		err = fmt.Errorf("tap %s isn't there: is /dev/net/tun another network namespace's?", name)
	}
	if err != nil {
		return nil, err
	}
	if err := s.links.LinkSetAlias(l, alias); err != nil {
		return nil, fmt.Errorf("mark tap %s as Cube's: %w", name, err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("turn IPv6 off on tap %s: %w", name, err)
	}
	if err := s.setMTU(l); err != nil {
		return nil, err
	}
	if err := s.datapath.AttachTap(l.Attrs().Index); err != nil {
		return nil, fmt.Errorf("make tap %s: %w", name, err)
	}
	if err := s.links.LinkSetUp(l); err != nil {
		return nil, fmt.Errorf("set tap %s up: %w", name, err)
	}
	return l, nil
}

// removeTap removes the tap of a number and then the number, from any state.
func (s *session) removeTap(number int) error {
	if err := s.removeDevice(number); err != nil {
		return err
	}
	if err := errors.Join(s.unmark(freeDir, strconv.Itoa(number)), s.unmark(tapsDir, strconv.Itoa(number))); err != nil {
		return fmt.Errorf("release tap %d: %w", number, err)
	}
	return nil
}

// removeDevice removes the tap and leaves its number taken.
func (s *session) removeDevice(number int) error {
	l, err := s.find(s.tapName(number))
	if err != nil || l == nil || l.Type() != "tuntap" {
		return err
	}
	// The device first: without its programs it would be open.
	return s.removeLink(l)
}

func (s *session) removeLink(l netlink.Link) error {
	if err := s.links.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove tap %s: %w", l.Attrs().Name, err)
	}
	if s.datapath != nil {
		if err := s.datapath.DetachTap(l.Attrs().Index); err != nil {
			return fmt.Errorf("detach the programs of tap %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

// setMTU gives a tap the gateway device's MTU.
func (s *session) setMTU(l netlink.Link) error {
	mtu := s.gateway.Attrs().MTU
	if l.Attrs().MTU == mtu {
		return nil
	}
	if err := s.links.LinkSetMTU(l, mtu); err != nil {
		return fmt.Errorf("set the MTU of %s to %d: %w", l.Attrs().Name, mtu, err)
	}
	l.Attrs().MTU = mtu
	return nil
}

// create makes a tap that stays, and that is down.
func create(name string) (err error) {
	// A child that has been forked and isn't its own program yet would have the tap too, and whoever opens it next be refused.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := attach(name, tapFlags|unix.IFF_TUN_EXCL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := control(f, unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("TUNSETPERSIST: %w", err)
	}
	return nil
}

// attach opens the tap of that name, or makes one that goes with the descriptor.
func attach(name string, flags uint16) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("TUNSETIFF: %w", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}

// control leaves the descriptor as it is, which File.Fd would not.
func control(f *os.File, request uint, value int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ioctl error
	if err := raw.Control(func(fd uintptr) { ioctl = unix.IoctlSetInt(int(fd), request, value) }); err != nil {
		return err
	}
	return ioctl
}
