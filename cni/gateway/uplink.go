package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// defaultMTU is Ethernet's, for a host without a default route.
const defaultMTU = 1500

// Limits of what the gateway device can have: IPv4's least (RFC 791 §3.2) and veth's most.
const minMTU, maxMTU = 576, 65535

// Uplink is where packets to the internet leave.
type Uplink struct {
	MTU     int      // the smallest of the devices', and Ethernet's without one
	Devices []string // none without a default route; several of a multipath one
}

func (u Uplink) equal(other Uplink) bool {
	return u.MTU == other.MTU && slices.Equal(u.Devices, other.Devices)
}

// LookUplink tells what the uplink is.
func LookUplink() (Uplink, error) {
	h, err := netlink.NewHandle()
	if err != nil {
		return Uplink{}, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	return lookUplink(h)
}

// lookUplink finds the default route with the lowest metric; of a multipath one, the smallest MTU counts.
func lookUplink(h *netlink.Handle) (Uplink, error) {
	up := Uplink{MTU: defaultMTU}
	routes, err := routes(h, unix.RT_TABLE_MAIN)
	if err != nil {
		return up, err
	}
	var best *netlink.Route
	for i, r := range routes {
		if isDefault(r.Dst) && r.Type == unix.RTN_UNICAST && (best == nil || r.Priority < best.Priority) {
			best = &routes[i]
		}
	}
	if best == nil {
		return up, nil
	}
	indices := []int{best.LinkIndex}
	if len(best.MultiPath) > 0 {
		indices = nil
		for _, hop := range best.MultiPath {
			indices = append(indices, hop.LinkIndex)
		}
	}
	mtu := maxMTU
	for _, i := range indices {
		l, err := h.LinkByIndex(i)
		var gone netlink.LinkNotFoundError
		if errors.As(err, &gone) {
			continue // and its route with it
		} else if err != nil {
			return up, fmt.Errorf("look for the uplink: %w", err)
		}
		mtu = min(mtu, l.Attrs().MTU)
		up.Devices = append(up.Devices, l.Attrs().Name)
	}
	if len(up.Devices) > 0 {
		up.MTU = max(mtu, minMTU)
	}
	return up, nil
}

// Watch keeps the gateway device's MTU at the uplink's until ctx ends, which is no error. changed, if not nil, is called
// with each other uplink, by the same goroutine, for those who have devices of their own to keep at its MTU. An error is a
// host that can't be watched; what was set stays, and Watch can be called again.
func (g *Gateway) Watch(ctx context.Context, changed func(Uplink)) error {
	c := g.events
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	for {
		up, err := g.follow()
		if err != nil && ctx.Err() == nil {
			return err
		}
		if err == nil && !up.equal(g.Uplink) {
			g.Uplink = up
			if changed != nil {
				changed(up)
			}
		}
		// Too much happened to be told of is something that happened.
		if _, err := c.Receive(); ctx.Err() != nil {
			return nil
		} else if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("watch the host's devices and routes: %w", err)
		}
	}
}

// follow sets the device's MTU to the uplink's. A device that isn't there is Repair's.
func (g *Gateway) follow() (Uplink, error) {
	up, err := lookUplink(g.h)
	if err != nil {
		return up, err
	}
	l, err := find(g.h, g.cfg.Network.Device)
	if err != nil || !ours(l) {
		return up, err
	}
	peer, err := find(g.h, peerOf(g.cfg.Network.Device))
	if err != nil || peer == nil {
		return up, err
	}
	return up, setMTU(g.h, l, peer, up.MTU)
}

// subscribe asks for what happens to devices and IPv4 routes in the calling thread's namespace.
func subscribe() (*mdl.Conn, error) {
	c, err := mdl.Dial(unix.NETLINK_ROUTE, &mdl.Config{Groups: unix.RTMGRP_LINK | unix.RTMGRP_IPV4_ROUTE})
	if err != nil {
		return nil, fmt.Errorf("watch the host's devices and routes: %w", err)
	}
	return c, nil
}
