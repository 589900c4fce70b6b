package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

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

// followHost refreshes what is open after each change. Where that fails for some, it is tried again, and no further change
// waits for it: until then, a policy opens what has become the host's.
func (d *Daemon) followHost(ctx context.Context) error {
	wait := firstRetry
	retry := time.NewTimer(wait)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.refresh:
		case <-retry.C:
		}
		retry.Stop()
		err := d.network.Refresh(ctx)
		switch {
		case err == nil:
			wait = firstRetry
		case ctx.Err() == nil:
			d.log.Error("not all that is open follows the host; it is tried again", "in", wait, "error", err)
			retry.Reset(wait)
			wait = min(2*wait, lastRetry)
		}
	}
}
