package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/cubesandbox/cube/bpf/policy"
)

// genBits is the length of the part of a policy row's key that is before the address.
const genBits = 32

// SetPolicy replaces a sandbox's policy in one step, for live flows from their next packet on; until then the old one holds,
// whole. Without rows the sandbox has no policy and reaches nothing. It takes some milliseconds more than until the policy
// is in force, for what was there before to be deleted.
func (d *Datapath) SetPolicy(id ID, rows []policy.Row) error {
	e, err := d.lock(id)
	if err != nil {
		return err
	}
	defer e.mu.Unlock()
	var gen uint32
	var keys []dpPolicyKey
	if len(rows) > 0 {
		if gen, keys, err = d.putRows(rows); err != nil {
			return err
		}
	}
	changed := e.value
	changed.Gen = gen
	if err := d.put(id, &changed); err != nil {
		return errors.Join(err, d.deleteRows(keys))
	}
	e.value.Gen = gen
	e.retired = append(e.retired, e.rows...)
	e.rows = keys
	// The policy is in force whatever becomes of the rest. A program that read the sandbox before needs the old rows until it
	// ends; rows that can't be deleted are tried again with the next policy.
	if err := waitPrograms(); err != nil {
		return err
	}
	if err := d.deleteRows(e.retired); err != nil {
		return err
	}
	e.retired = nil
	return nil
}

// putRows writes a policy under a generation of its own, all of it or nothing.
func (d *Datapath) putRows(rows []policy.Row) (gen uint32, keys []dpPolicyKey, err error) {
	if gen, err = d.next(); err != nil {
		return 0, nil, err
	}
	keys = make([]dpPolicyKey, 0, len(rows))
	for _, r := range rows {
		key := dpPolicyKey{Prefixlen: genBits + uint32(r.Prefix.Bits()), Gen: gen, Ip: ip4(r.Prefix.Addr())}
		value := verdict(r.Verdict)
		if err := d.objs.Policy.Put(&key, &value); err != nil {
			return 0, nil, errors.Join(fmt.Errorf("set the policy's row for %v: %w", r.Prefix, err), d.deleteRows(keys))
		}
		keys = append(keys, key)
	}
	return gen, keys, nil
}

func (d *Datapath) deleteRows(keys []dpPolicyKey) error {
	for i := range keys {
		if err := d.objs.Policy.Delete(&keys[i]); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete a row of generation %d: %w", keys[i].Gen, err)
		}
	}
	return nil
}

func verdict(v policy.Verdict) dpVerdict {
	to := dpVerdict{Action: action(v.Action), Rule: v.Rule, Ranges: uint8(len(v.Ranges))}
	for i, r := range v.Ranges {
		to.Range[i] = dpRange{Lo: r.First, Hi: r.Last, Proto: uint8(r.Protocol), Action: action(r.Action), Rule: r.Rule}
	}
	return to
}

func action(a policy.Action) uint8 {
	switch a {
	case policy.Direct:
		return uint8(dpActionACTION_DIRECT)
	case policy.Proxy:
		return uint8(dpActionACTION_PROXY)
	case policy.HardDeny:
		return uint8(dpActionACTION_HARD_DENY)
	}
	return uint8(dpActionACTION_DENY)
}
