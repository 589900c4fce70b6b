package bpf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/ebpf"
)

// RunReaper forgets idle flows every interval until the context ends. A pass that fails is logged, and the next one does
// its work too.
func (d *Datapath) RunReaper(ctx context.Context, interval time.Duration, t Timeouts) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if _, err := d.Reap(t); err != nil {
				slog.Error("forget idle flows", "error", err)
			}
		}
	}
}

// owner is a sandbox in its time.
type owner struct{ id, epoch uint32 }

// Reap forgets the flows that have been idle for too long and returns how many those were.
//
// Who was killed between deleting flows and giving them back to the quota has left it too small. So the flows are counted
// on the way, and where none was opened meanwhile the count corrects the quota.
func (d *Datapath) Reap(t Timeouts) (int, error) {
	d.walks.Lock()
	defer d.walks.Unlock()
	before, err := d.opened()
	if err != nil {
		return 0, err
	}
	live, gone := map[owner]uint32{}, map[owner]uint32{}
	now, reaped := monotonic(), 0
	err = d.walk(func(k *dpFlowKey, v *dpFlow) bool {
		f := flowOf(k, v, now)
		o := owner{k.Id, k.Epoch}
		if f.Idle <= t.limit(f) {
			live[o]++
			return false
		}
		gone[o]++
		reaped++
		return true
	})
	// The rest is of no use to who came after a sandbox that has been removed since.
	after, afterErr := d.opened()
	errs := []error{err, afterErr}
	for o, n := range gone {
		if _, ok := after[o]; ok {
			errs = append(errs, d.addClosed(ID(o.id), n))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return reaped, err
	}
	for o, n := range after {
		if was, ok := before[o]; ok && was == n {
			errs = append(errs, d.setClosed(ID(o.id), n-live[o]))
		}
	}
	return reaped, errors.Join(errs...)
}

// opened returns how many flows each sandbox has opened.
func (d *Datapath) opened() (map[owner]uint32, error) {
	sandboxes, err := d.all()
	if err != nil {
		return nil, err
	}
	opened := map[owner]uint32{}
	for id, v := range sandboxes {
		var m dpMeter
		if err := d.objs.Meters.LookupWithFlags(uint32(id), &m, ebpf.LookupLock); err != nil {
			return nil, fmt.Errorf("read meter %d: %w", id, err)
		}
		opened[owner{uint32(id), v.Epoch}] = m.Opened
	}
	return opened, nil
}
