package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// recover takes over the sandboxes that the maps have and removes what belongs to none: of a process that was killed
// between two steps.
func (d *Datapath) recover() error {
	sandboxes, err := d.all()
	if err != nil {
		return err
	}
	gens, epochs := map[uint32]bool{}, map[uint32]bool{}
	for _, v := range sandboxes {
		gens[v.Gen], epochs[v.Epoch] = true, true
	}
	if err := recoverIndex(d.objs.Taps, sandboxes, func(v dpSandbox) uint32 { return v.Ifindex }); err != nil {
		return fmt.Errorf("taps: %w", err)
	}
	if err := recoverIndex(d.objs.Addresses, sandboxes, func(v dpSandbox) uint32 { return v.HostIp }); err != nil {
		return fmt.Errorf("addresses: %w", err)
	}
	if err := d.recoverRows(gens); err != nil {
		return fmt.Errorf("policy rows: %w", err)
	}
	d.walks.Lock()
	defer d.walks.Unlock()
	return d.walk(func(k *dpFlowKey, _ *dpFlow) bool { return !epochs[k.Epoch] })
}

// recoverIndex removes from a map that leads to sandboxes what leads elsewhere. All sandboxes are in it: they are opened last.
func recoverIndex(m *ebpf.Map, sandboxes map[ID]dpSandbox, key func(dpSandbox) uint32) error {
	var k, id uint32
	var stale []uint32
	it := m.Iterate()
	for it.Next(&k, &id) {
		if v, ok := sandboxes[ID(id)]; !ok || key(v) != k {
			stale = append(stale, k)
		}
	}
	errs := []error{it.Err()}
	for _, k := range stale {
		if err := m.Delete(k); !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// recoverRows deletes the rows of generations that no sandbox has.
func (d *Datapath) recoverRows(gens map[uint32]bool) error {
	var stale []dpPolicyKey
	var key dpPolicyKey
	var value dpVerdict
	it := d.objs.Policy.Iterate()
	for it.Next(&key, &value) {
		if !gens[key.Gen] {
			stale = append(stale, key)
		}
	}
	return errors.Join(it.Err(), d.deleteRows(stale))
}
