package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// WatchChanges calls rules when somebody has changed Cube's nftables table, and rest when what else Up makes may have been
// changed, until ctx ends, which is no error: Repair's own changes are among them, and first of all what happened before.
// They are called by two goroutines. Of settings of devices the kernel tells of forwarding and rp_filter only.
func WatchChanges(ctx context.Context, cfg *config.Config, rules, rest func()) error {
	nft, err := mdl.Dial(unix.NETLINK_NETFILTER, &mdl.Config{Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
	if err != nil {
		return fmt.Errorf("watch nftables: %w", err)
	}
	defer nft.Close()
	route, err := mdl.Dial(unix.NETLINK_ROUTE, &mdl.Config{
		Groups: unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV4_RULE | 1<<(unix.RTNLGRP_IPV4_NETCONF-1),
	})
	if err != nil {
		return fmt.Errorf("watch what the gateway is of: %w", err)
	}
	defer route.Close()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	own := &objects{network: &cfg.Network, devices: map[uint32]bool{}}
	for _, name := range own.names() {
		l, err := find(h, name)
		if err != nil {
			return err
		}
		if l != nil {
			own.devices[uint32(l.Attrs().Index)] = true
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return tell(ctx, nft, own.ruled, rules) })
	g.Go(func() error { return tell(ctx, route, own.touched, rest) })
	return g.Wait()
}

// tell calls changed for each batch of messages with one that concerns us.
func tell(ctx context.Context, c *mdl.Conn, concerns func(mdl.Message) bool, changed func()) error {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	changed()
	for {
		messages, err := c.Receive()
		if ctx.Err() != nil {
			return nil
		}
		// Too much happened to be told of is something that happened.
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("watch what the gateway is of: %w", err)
		}
		ours := err != nil
		for _, m := range messages {
			ours = concerns(m) || ours // each, as it may teach
		}
		if ours {
			changed()
		}
	}
}

// objects tells messages about what Up makes from those about the host's other things, of which there may be many.
type objects struct {
	network *config.Network
	devices map[uint32]bool // by index: those that have had the names
}

func (o *objects) names() []string { return []string{o.network.Device, peerOf(o.network.Device)} }

// ruled is about nftables: a message's first attribute is its table's name, whatever it is about.
func (o *objects) ruled(m mdl.Message) bool {
	_, a, err := attributes(m)
	return err != nil || text(a[unix.NFTA_TABLE_NAME]) == o.network.NFTable
}

// touched is about devices, addresses, routes, rules and forwarding. What it can't read may be ours.
func (o *objects) touched(m mdl.Message) bool {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return o.link(m.Data)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return len(m.Data) < unix.SizeofIfAddrmsg || o.devices[binary.NativeEndian.Uint32(m.Data[4:])]
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return o.route(m.Data)
	case unix.RTM_NEWNETCONF:
		return o.setting(m.Data)
	}
	return true // of rules there are few
}

// link goes by the name first, and by the index for a device that has lost it.
func (o *objects) link(b []byte) bool {
	if len(b) < unix.SizeofIfInfomsg {
		return true
	}
	index := binary.NativeEndian.Uint32(b[4:])
	a, err := nested(b[unix.SizeofIfInfomsg:])
	if err != nil {
		return true
	}
	for _, name := range o.names() {
		if text(a[unix.IFLA_IFNAME]) == name {
			o.devices[index] = true
		}
	}
	return o.devices[index]
}

func (o *objects) route(b []byte) bool {
	if len(b) < unix.SizeofRtMsg {
		return true
	}
	a, err := nested(b[unix.SizeofRtMsg:])
	if err != nil {
		return true
	}
	is := func(key uint16, value int) bool {
		return len(a[key]) == 4 && binary.NativeEndian.Uint32(a[key]) == uint32(value)
	}
	oif := a[unix.RTA_OIF]
	return is(unix.RTA_TABLE, o.network.RouteTable) || len(oif) == 4 && o.devices[binary.NativeEndian.Uint32(oif)] ||
		int(b[1]) == o.network.Pool.Bits() && bytes.Equal(a[unix.RTA_DST], o.network.Pool.Addr().AsSlice()) // rtm_dst_len
}

// Of linux/netconf.h: a message about settings has a header (struct netconfmsg), and the index of a device.
const (
	sizeofNetconfmsg  = 4 // aligned
	netconfaIfindex   = 1
	netconfIfindexAll = ^uint32(0) // -1
)

func (o *objects) setting(b []byte) bool {
	if len(b) < sizeofNetconfmsg {
		return true
	}
	a, err := nested(b[sizeofNetconfmsg:])
	if err != nil || len(a[netconfaIfindex]) != 4 {
		return true
	}
	index := binary.NativeEndian.Uint32(a[netconfaIfindex])
	return index == netconfIfindexAll || o.devices[index]
}
