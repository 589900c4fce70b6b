package bpf

import (
	"errors"
	"fmt"
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
	// All sandboxes have what leads to them: they are opened last.
	if err := unleadAll(d.objs.Taps, func(ifindex uint32, to ID) bool { return sandboxes[to].Ifindex != ifindex }); err != nil {
		return fmt.Errorf("taps: %w", err)
	}
	if err := unleadAll(d.objs.Addresses, func(ip uint32, to ID) bool { return sandboxes[to].HostIp != ip }); err != nil {
		return fmt.Errorf("addresses: %w", err)
	}
	if err := d.recoverRows(gens); err != nil {
		return fmt.Errorf("policy rows: %w", err)
	}
	d.walks.Lock()
	defer d.walks.Unlock()
	return d.walk(func(k *dpFlowKey, _ *dpFlow) bool { return !epochs[k.Epoch] })
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
