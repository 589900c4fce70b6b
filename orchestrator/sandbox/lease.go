package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// leaseLabel is on the leases of this process, of which there is one at a time.
const leaseLabel = "io.cube.making"

// leaseExpiry is when containerd drops a lease that nobody does, as its own client has it.
const leaseExpiry = 24 * time.Hour

// lease keeps what is made with the returned context from containerd's garbage collector until done is called.
func (c *Client) lease(ctx context.Context) (leased context.Context, done func(), err error) {
	leased, drop, err := c.ctrd.WithLease(ctx, leases.WithRandomID(), leases.WithExpiration(leaseExpiry), leases.WithLabel(leaseLabel, "true"))
	if err != nil {
		return nil, nil, fmt.Errorf("make a lease: %w", err)
	}
	return leased, func() {
		cctx, cancel := c.cleanup(ctx)
		defer cancel()
		if c.Await(cctx) == nil {
			_ = drop(cctx) // DropLeases has another go at it
		}
	}, nil
}

// DropLeases removes the leases of processes before this one, which has none yet, and has what they kept be gone.
func (c *Client) DropLeases(ctx context.Context) error {
	ctx = c.context(ctx)
	all, err := c.ctrd.LeasesService().List(ctx, fmt.Sprintf("labels.%q==true", leaseLabel))
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
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
