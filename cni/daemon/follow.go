package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"

	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/gateway"
)

// changed has all that is open follow the host.
func (d *Daemon) changed() { signal(d.refresh) }

// followUplink keeps MTUs at the uplink's.
func (d *Daemon) followUplink(ctx context.Context) error {
	return d.gateway.Watch(ctx, func(up gateway.Uplink) {
		if len(up.Devices) > 0 {
			d.log.Info("the uplink has changed", "devices", strings.Join(up.Devices, " "), "mtu", up.MTU)
		}
		d.warn(up)
		d.changed()
	})
}

func (d *Daemon) warn(up gateway.Uplink) {
	if len(up.Devices) == 0 {
		d.log.Warn("there is no default route: sandboxes reach what the host has routes to, not the internet; they will when one is added")
	}
}

// followAddresses has policies follow the host's addresses, which none opens.
func (d *Daemon) followAddresses(ctx context.Context) error {
	c, err := mdl.Dial(unix.NETLINK_ROUTE, &mdl.Config{Groups: unix.RTMGRP_IPV4_IFADDR})
	if err != nil {
		return fmt.Errorf("watch the host's addresses: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	for {
		d.changed() // also for what happened before
		d.ports.Changed()
		// Too much happened to be told of is something that happened.
		if _, err := c.Receive(); ctx.Err() != nil {
			return nil
		} else if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("watch the host's addresses: %w", err)
		}
	}
}

// followHost refreshes what is open after each change. Where that fails for some, it is tried again.
func (d *Daemon) followHost(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.refresh:
		}
		if err := d.network.Refresh(ctx); err != nil {
			d.changed()
			return err
		}
	}
}
