package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/process"
)

// leaseLabel is on the leases of Cube's processes, each of which is a maker's.
const leaseLabel = "io.cube.maker"

// leaseExpiry is when containerd drops a lease that nobody does, as its own client has it.
const leaseExpiry = 24 * time.Hour

// maker is how leases name a process. Nobody else is it, as long as the host doesn't boot.
func maker(id process.ID) string { return fmt.Sprintf("%d-%d", id.PID, id.Start) }

// makerOf reads that; what can't be read is no process.
func makerOf(label string) (id process.ID) {
	if _, err := fmt.Sscanf(label, "%d-%d", &id.PID, &id.Start); err != nil {
		return process.ID{}
	}
	return id
}

// leaseOptions are those of this process's leases.
func leaseOptions() ([]leases.Opt, error) {
	self, err := process.Self()
	if err != nil {
		return nil, fmt.Errorf("make a lease: %w", err)
	}
	return []leases.Opt{leases.WithRandomID(), leases.WithExpiration(leaseExpiry), leases.WithLabel(leaseLabel, maker(self))}, nil
}

// lease keeps what is made with the returned context from containerd's garbage collector until done is called. containerd's client
// makes one by itself where there is none, which it leaves behind when a context ends, or containerd, before it is done with it.
func (c *Client) lease(ctx context.Context) (leased context.Context, done func(), err error) {
	opts, err := leaseOptions()
	if err != nil {
		return nil, nil, err
	}
	leased, drop, err := c.ctrd.WithLease(ctx, opts...)
	if err != nil {
		return nil, nil, fmt.Errorf("make a lease: %w", err)
	}
	return leased, func() {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		if drop(cctx) != nil && c.Await(cctx) == nil {
			_ = drop(cctx) // DropLeases has another go at it
		}
	}, nil
}

// DropLeases removes the leases of processes that are gone, and has what they kept be gone.
func (c *Client) DropLeases(ctx context.Context) error {
	ctx = c.context(ctx)
	all, err := c.ctrd.LeasesService().List(ctx, fmt.Sprintf("labels.%q", leaseLabel))
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	all = slices.DeleteFunc(all, func(l leases.Lease) bool { return makerOf(l.Labels[leaseLabel]).Alive() })
	var errs []error
	for i, l := range all {
		var how []leases.DeleteOpt
		if i == len(all)-1 {
			how = append(how, leases.SynchronousDelete)
		}
		if err := c.ctrd.LeasesService().Delete(ctx, l, how...); err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("remove lease %s: %w", l.ID, err))
		}
	}
	return errors.Join(errs...)
}

// CollectGarbage has containerd remove what nobody needs, of all kinds and in all namespaces, and returns when the space is
// free.
func (c *Client) CollectGarbage(ctx context.Context) error {
	ctx = c.context(ctx)
	opts, err := leaseOptions()
	if err != nil {
		return err
	}
	// The end of a lease is what containerd collects garbage for while somebody waits, for snapshotters' Cleanup, too.
	l, err := c.ctrd.LeasesService().Create(ctx, opts...)
	if err == nil {
		if err = c.ctrd.LeasesService().Delete(ctx, l, leases.SynchronousDelete); err == nil {
			return nil
		}
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		if c.Await(cctx) == nil {
			_ = c.ctrd.LeasesService().Delete(cctx, l) // else DropLeases does
		}
	}
	return fmt.Errorf("have containerd collect garbage: %w", err)
}
