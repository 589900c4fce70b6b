package bpf

import (
	"errors"
	"fmt"
)

// Suspend has nothing pass to or from a sandbox until Resume. Its flows stay. When it returns no program has a packet of the
// sandbox's in hands. It can be called again.
func (d *Datapath) Suspend(id ID) error {
	v, unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := errors.Join(unlead(d.objs.Taps, v.Ifindex), unlead(d.objs.Addresses, v.HostIp)); err != nil {
		return fmt.Errorf("suspend sandbox %d: %w", id, err)
	}
	return waitPrograms()
}

// Resume ends what Suspend began, if it did. errdefs.ErrAlreadyExists if another sandbox has the tap or the host's address by
// then.
func (d *Datapath) Resume(id ID) error {
	v, unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	return d.leadTo(id, &v)
}

// Renew begins another life of a sandbox that is suspended: the flows of the one before are forgotten, so that a packet of
// theirs is one of no flow. Its policy, its settings and its counters stay.
func (d *Datapath) Renew(id ID) error {
	v, unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	if v.Epoch, err = d.next(); err != nil {
		return err
	}
	if err := d.put(id, &v); err != nil {
		return err
	}
	return d.deleteFlows(id)
}
