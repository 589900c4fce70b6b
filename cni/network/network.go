package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"runtime"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/undo"
)

// What every guest has on its network card, so that a restored one has nothing to learn. The host knows it by another
// address.
var (
	GuestPrefix  = netip.MustParsePrefix("169.254.68.6/30")
	GuestGateway = netip.MustParseAddr("169.254.68.5")
	GuestMAC     = net.HardwareAddr{0x02, 'c', 'u', 'b', 'e', 0x01} // of every machine's card
)

// lockTimeout bounds the wait for others who work on the same.
const lockTimeout = 30 * time.Second

// Bounds of what a sandbox can do, whatever its policy.
var (
	echo     = bpf.Echo{MaxPayload: 128, Rate: bpf.Rate{PerSecond: 64, Burst: 64}}
	events   = bpf.Rate{PerSecond: 10, Burst: 50}
	newFlows = bpf.Rate{PerSecond: 1000, Burst: 2000}
)

// Network works on the network that a configuration is about. It holds nothing; its methods are safe for concurrent use, in
// any number of processes.
type Network struct {
	cfg *config.Config
}

// New does nothing yet.
func New(cfg *config.Config) *Network { return &Network{cfg: cfg} }

func (n *Network) path(elem ...string) string {
	return filepath.Join(append([]string{n.cfg.NetworkDir()}, elem...)...)
}

// datapath is what the datapath is opened with.
func (n *Network) datapath(gatewayIndex int) bpf.Config {
	m := n.cfg.Network.Marks()
	return bpf.Config{
		Dir:     n.path("bpf"),
		Gateway: bpf.Gateway{Ifindex: gatewayIndex, IP: GuestGateway, MAC: gateway.MAC},
		Marks:   bpf.Marks{Mask: m.Mask, Direct: m.Direct, Proxy: m.Proxy, Resolver: m.Resolver, Guest: m.Guest},
		Echo:    echo,
		Events:  events,
	}
}

// session is what an operation has open. It is on one thread, whose namespace is the network's.
type session struct {
	*Network
	links    *netlink.Handle
	datapath *bpf.Datapath // nil: none is loaded
	gateway  netlink.Link  // nil: there is none
	open     undo.Stack
}

// begin takes the lock and opens what there is. fs.ErrNotExist: there is no network.
func (n *Network) begin(ctx context.Context, alone bool) (*session, error) {
	unlock, err := n.lock(ctx, n.cfg.NetworkDir(), !alone)
	if err != nil {
		return nil, err
	}
	return n.locked(unlock)
}

// locked is begin for who has the lock, which goes to the session, or is released if there is none.
func (n *Network) locked(unlock func()) (_ *session, err error) {
	s := &session{Network: n}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.open.Release())
		}
	}()
	s.open.Push(func() error { unlock(); return nil })
	runtime.LockOSThread()
	s.open.Push(func() error { runtime.UnlockOSThread(); return nil })
	if s.links, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER); err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s.open.Push(func() error { s.links.Close(); return nil })
	index := 0
	if s.gateway, err = s.find(n.cfg.Network.Device); err != nil {
		return nil, err
	} else if s.gateway != nil {
		index = s.gateway.Attrs().Index
	}
	s.datapath, err = bpf.Use(n.datapath(index))
	if errdefs.IsUnavailable(err) {
		return s, nil
	} else if err != nil {
		return nil, err
	}
	s.open.Push(s.datapath.Close)
	return s, nil
}

// beginUp is begin for what takes a network that is up; errdefs.ErrUnavailable if it isn't.
func (n *Network) beginUp(ctx context.Context) (*session, error) {
	s, err := n.begin(ctx, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, notUp("nothing is set up")
	} else if err != nil {
		return nil, err
	}
	if s.gateway == nil {
		err = notUp("device " + n.cfg.Network.Device + " is missing")
	} else if s.datapath == nil {
		err = notUp("no datapath of this version is loaded")
	}
	if err != nil {
		return nil, errors.Join(err, s.open.Release())
	}
	return s, nil
}

func notUp(why string) error {
	return fmt.Errorf("the network isn't up: %s; start the stack: cube up: %w", why, errdefs.ErrUnavailable)
}

// end lets go of all.
func (s *session) end(err *error) { *err = errors.Join(*err, s.open.Release()) }

func (n *Network) lock(ctx context.Context, dir string, shared bool) (func(), error) {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Timeout(lockTimeout))
	defer cancel()
	unlock, err := flock.LockDir(ctx, dir, shared)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("wait for others who change the network: %w: %w", err, errdefs.ErrUnavailable)
	}
	return unlock, err
}
