package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// recover takes over the sandboxes that the maps have and removes what belongs to none: of a process that was killed
// between two steps.
func (d *Datapath) recover() error {
	var err error
	if d.cpus, err = ebpf.PossibleCPU(); err != nil {
		return err
	}
	if err := d.objs.Serial.Lookup(uint32(0), &d.serial); err != nil {
		return fmt.Errorf("read the last generation: %w", err)
	}
	gens, epochs := map[uint32]*entry{}, map[uint32]bool{}
	for id := ID(1); id <= MaxSandboxes; id++ {
		e := &entry{}
		if err := d.objs.Sandboxes.LookupWithFlags(uint32(id), &e.value, ebpf.LookupLock); err != nil {
			return fmt.Errorf("read sandbox %d: %w", id, err)
		}
		if e.value.Ifindex == 0 {
			continue
		}
		d.sandboxes[id] = e
		epochs[e.value.Epoch] = true
		if e.value.Gen != 0 {
			gens[e.value.Gen] = e
		}
	}
	if err := d.recoverIndex(d.objs.Taps, func(e *entry) uint32 { return e.value.Ifindex }); err != nil {
		return fmt.Errorf("taps: %w", err)
	}
	if err := d.recoverIndex(d.objs.Addresses, func(e *entry) uint32 { return e.value.HostIp }); err != nil {
		return fmt.Errorf("addresses: %w", err)
	}
	if err := d.recoverRows(gens); err != nil {
		return fmt.Errorf("policy rows: %w", err)
	}
	d.walks.Lock()
	defer d.walks.Unlock()
	return d.walk(func(k *dpFlowKey, _ *dpFlow) bool { return !epochs[k.Epoch] })
}

// recoverIndex makes a map that leads to sandboxes lead to all of them and nowhere else. A sandbox that was set, but not yet
// the maps that lead to it, is complete.
func (d *Datapath) recoverIndex(m *ebpf.Map, key func(*entry) uint32) error {
	var k, id uint32
	var stale []uint32
	for it := m.Iterate(); ; {
		if !it.Next(&k, &id) {
			if err := it.Err(); err != nil {
				return err
			}
			break
		}
		if e, ok := d.sandboxes[ID(id)]; !ok || key(e) != k {
			stale = append(stale, k)
		}
	}
	for _, k := range stale {
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	for id, e := range d.sandboxes {
		if err := m.Put(key(e), uint32(id)); err != nil {
			return err
		}
	}
	return nil
}

// recoverRows remembers the rows of each sandbox's generation and deletes those of others.
func (d *Datapath) recoverRows(gens map[uint32]*entry) error {
	var stale []dpPolicyKey
	var key dpPolicyKey
	var value dpVerdict
	it := d.objs.Policy.Iterate()
	for it.Next(&key, &value) {
		if e, ok := gens[key.Gen]; ok {
			e.rows = append(e.rows, key)
		} else {
			stale = append(stale, key)
		}
	}
	return errors.Join(it.Err(), d.deleteRows(stale))
}
