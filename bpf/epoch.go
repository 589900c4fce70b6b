package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
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
	return errors.Join(d.deleteFlows(id), d.deleteFragments(v.HostIp))
}

// deleteFragments forgets the packets to an address of which the beginning was let through: their rest isn't any more.
func (d *Datapath) deleteFragments(to uint32) error {
	all := int(d.objs.Fragments.MaxEntries())
	var cursor ebpf.MapBatchCursor
	keys, since := make([]dpFragmentKey, all), make([]uint64, all)
	n, err := d.objs.Fragments.BatchLookup(&cursor, keys, since, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // which says that these are all
		return fmt.Errorf("read fragments: %w", err)
	}
	var errs []error
	for _, key := range keys[:n] {
		if key.HostIp != to {
			continue
		}
		if err := d.objs.Fragments.Delete(&key); !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("forget fragments: %w", err)
	}
	return nil
}
