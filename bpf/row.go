package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

// genBits is the length of the part of a policy row's key that is before the address.
const genBits = 32

// SetPolicy replaces a sandbox's policy in one step, for live flows from their next packet on; until then the old one holds,
// whole. Without rows the sandbox has no policy and reaches nothing. It takes some milliseconds more than until the policy
// is in force, for what was there before to be deleted. errdefs.ErrResourceExhausted if there is no room for more rows.
func (d *Datapath) SetPolicy(id ID, rows []policy.Row) error {
	value, unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	old, err := d.rowsOf(value.Gen)
	if err != nil {
		return err
	}
	var keys []dpPolicyKey
	value.Gen = 0
	if len(rows) > 0 {
		if value.Gen, keys, err = d.putRows(rows); err != nil {
			return err
		}
	}
	if err := d.put(id, &value); err != nil {
		return errors.Join(err, d.deleteRows(keys))
	}
	// The policy is in force whatever becomes of the rest. A program that read the sandbox before needs the old rows until it
	// ends; rows that can't be deleted go when the datapath is opened again.
	if err := waitPrograms(); err != nil {
		return err
	}
	return d.deleteRows(old)
}

// putRows writes a policy under a generation of its own, all of it or nothing.
func (d *Datapath) putRows(rows []policy.Row) (gen uint32, keys []dpPolicyKey, err error) {
	if gen, err = d.next(); err != nil {
		return 0, nil, err
	}
	rows = withLowest(rows)
	keys = make([]dpPolicyKey, 0, len(rows))
	for _, r := range rows {
		key := rowKey(gen, r.Prefix)
		value := verdict(r.Verdict)
		err := d.objs.Policy.Put(&key, &value)
		if errors.Is(err, unix.ENOSPC) {
			err = fmt.Errorf("the policies of all sandboxes have %d rows by now, and no more are possible; give fewer rules, to fewer sandboxes: %w", d.objs.Policy.MaxEntries(), errdefs.ErrResourceExhausted)
		}
		if err != nil {
			return 0, nil, errors.Join(fmt.Errorf("set the policy's row for %v: %w", r.Prefix, err), d.deleteRows(keys))
		}
		keys = append(keys, key)
	}
	return gen, keys, nil
}

// lowest is the address that a policy always has a row of its own for. In the order of the trie, children before their
// parents and those with a 0 first, it is the first row of its generation, and the generation's rows come one after the other.
var lowest = netip.PrefixFrom(netip.IPv4Unspecified(), 32)

// withLowest adds that row, with what is said of the address anyway.
func withLowest(rows []policy.Row) []policy.Row {
	best := policy.Row{Prefix: netip.PrefixFrom(lowest.Addr(), 0)}
	for _, r := range rows {
		if r.Prefix.Contains(lowest.Addr()) && r.Prefix.Bits() >= best.Prefix.Bits() {
			best = r
		}
	}
	if best.Prefix == lowest {
		return rows
	}
	return append(slices.Clip(rows), policy.Row{Prefix: lowest, Verdict: best.Verdict})
}

// rowsOf lists the rows of a generation.
func (d *Datapath) rowsOf(gen uint32) ([]dpPolicyKey, error) {
	if gen == 0 {
		return nil, nil
	}
	key := rowKey(gen, lowest)
	keys := []dpPolicyKey{key}
	for {
		var next dpPolicyKey
		err := d.objs.Policy.NextKey(&key, &next)
		if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && next.Gen != gen {
			return keys, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list the rows of generation %d: %w", gen, err)
		}
		keys = append(keys, next)
		key = next
	}
}

func rowKey(gen uint32, p netip.Prefix) dpPolicyKey {
	return dpPolicyKey{Prefixlen: genBits + uint32(p.Bits()), Gen: gen, Ip: ip4(p.Addr())}
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
