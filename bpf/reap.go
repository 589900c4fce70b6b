package bpf

import (
	"context"
	"errors"
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
	live, gone := map[ID]uint32{}, map[ID]uint32{}
	now, reaped := monotonic(), 0
	err = d.walk(func(k *dpFlowKey, v *dpFlow) bool {
		f := flowOf(k, v, now)
		if f.Idle <= t.limit(f) {
			live[ID(k.Id)]++
			return false
		}
		gone[ID(k.Id)]++
		reaped++
		return true
	})
	errs := []error{err}
	for id, n := range gone {
		errs = append(errs, d.addClosed(id, n))
	}
	if err := errors.Join(errs...); err != nil {
		return reaped, err
	}
	after, err := d.opened()
	if err != nil {
		return reaped, err
	}
	for id, n := range after {
		if was, ok := before[id]; ok && was == n {
			errs = append(errs, d.setClosed(id, n-live[id]))
		}
	}
	return reaped, errors.Join(errs...)
}

// opened returns how many flows each sandbox has opened.
func (d *Datapath) opened() (map[ID]uint32, error) {
	opened := map[ID]uint32{}
	for _, id := range d.ids() {
		var m dpMeter
		if err := d.objs.Meters.LookupWithFlags(uint32(id), &m, ebpf.LookupLock); err != nil {
			return nil, err
		}
		opened[id] = m.Opened
	}
	return opened, nil
}

func (d *Datapath) ids() []ID {
	d.mu.Lock()
	defer d.mu.Unlock()
	ids := make([]ID, 0, len(d.sandboxes))
	for id := range d.sandboxes {
		ids = append(ids, id)
	}
	return ids
}
