package bpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/undo"
)

// ID names a sandbox of the datapath while it is there; later it may name another one. Who adds sandboxes gives them out, 1
// to MaxSandboxes. 0 names none.
type ID uint32

// MaxSandboxes is how many there can be at a time.
const MaxSandboxes = 4096 - 1

func (id ID) valid() bool { return id >= 1 && id <= MaxSandboxes }

func notFound(id ID) error { return fmt.Errorf("sandbox %d: %w", id, errdefs.ErrNotFound) }

// Sandbox is what belongs to a tap.
type Sandbox struct {
	ID       ID
	Ifindex  int
	GuestIP  netip.Addr // any number of sandboxes may have the same
	GuestMAC net.HardwareAddr
	HostIP   netip.Addr // what the host knows it by; no two sandboxes have the same
	// Suspended has nothing pass before Resume.
	Suspended bool
	Settings
}

// Settings are what can change in the life of a sandbox.
type Settings struct {
	// Resolver has all that goes to port 53, of any address, marked for the resolver. Otherwise the policy decides on it.
	Resolver bool
	// MaxFlows is how many flows can be open, whoever opened them.
	MaxFlows uint32
	// NewFlows limits the flows that the sandbox opens.
	NewFlows Rate
	// TX and RX limit bytes from and to the sandbox.
	TX, RX Rate
}

func (s Sandbox) validate() error {
	if !s.ID.valid() {
		return fmt.Errorf("sandbox %d: ids are 1 to %d: %w", s.ID, MaxSandboxes, errdefs.ErrInvalidArgument)
	}
	if s.Ifindex <= 0 || !s.GuestIP.Is4() || !s.HostIP.Is4() || !validMAC(s.GuestMAC) {
		return fmt.Errorf("sandbox with tap %d, addresses %v and %v, MAC %v: it takes a device, two IPv4 and a unicast MAC address: %w", s.Ifindex, s.GuestIP, s.HostIP, s.GuestMAC, errdefs.ErrInvalidArgument)
	}
	return s.Settings.validate()
}

func (s Settings) validate() error {
	if err := s.NewFlows.validate("flows opened", 1); err != nil {
		return err
	}
	// The largest frame that a guest can hand over has to fit.
	for what, r := range map[string]Rate{"bytes from the sandbox": s.TX, "bytes to the sandbox": s.RX} {
		if err := r.validate(what, 1<<17); err != nil {
			return err
		}
	}
	return nil
}

func (s Settings) put(to *dpSandbox) {
	to.Flags = 0
	if s.Resolver {
		to.Flags = sandboxResolver
	}
	to.MaxFlows, to.Flows, to.Tx, to.Rx = s.MaxFlows, s.NewFlows.kernel(), s.TX.kernel(), s.RX.kernel()
}

// sandboxResolver is SANDBOX_RESOLVER.
const sandboxResolver = 1

// AddSandbox opens a tap for a sandbox, with a policy or, without rows, none. Counters begin at 0, and nothing of the tap's
// or the id's former owner is left. errdefs.ErrAlreadyExists if a sandbox has the id, the tap or the host's address.
func (d *Datapath) AddSandbox(s Sandbox, rows []policy.Row) (err error) {
	if err := s.validate(); err != nil {
		return err
	}
	d.turns[s.ID].Lock()
	defer d.turns[s.ID].Unlock()
	if have, err := d.get(s.ID); err != nil {
		return err
	} else if have.Ifindex != 0 {
		return fmt.Errorf("sandbox %d is there: %w", s.ID, errdefs.ErrAlreadyExists)
	}
	value := dpSandbox{
		Ifindex: uint32(s.Ifindex), Id: uint32(s.ID), GuestIp: ip4(s.GuestIP), HostIp: ip4(s.HostIP), GuestMac: [6]byte(s.GuestMAC),
	}
	s.put(&value)
	var u undo.Stack
	defer u.Run(&err)
	if err := d.reset(s.ID); err != nil {
		return err
	}
	if value.Epoch, err = d.next(); err != nil {
		return err
	}
	if len(rows) > 0 {
		var keys []dpPolicyKey
		if value.Gen, keys, err = d.putRows(rows); err != nil {
			return err
		}
		u.Push(func() error { return d.deleteRows(keys) })
	}
	if !s.Suspended {
		if err := d.leadTo(s.ID, &value); err != nil {
			return err
		}
		u.Push(func() error {
			return errors.Join(unlead(d.objs.Taps, value.Ifindex), unlead(d.objs.Addresses, value.HostIp))
		})
	}
	return d.put(s.ID, &value) // it is open from here on
}

// leadTo has the programs find a sandbox. Nothing leads to it when that fails.
func (d *Datapath) leadTo(id ID, v *dpSandbox) (err error) {
	var u undo.Stack
	defer u.Run(&err)
	if err := lead(d.objs.Addresses, v.HostIp, id); err != nil {
		return fmt.Errorf("set address %v of sandbox %d: %w", addrOf(v.HostIp), id, err)
	}
	u.Push(func() error { return unlead(d.objs.Addresses, v.HostIp) })
	if err := lead(d.objs.Taps, v.Ifindex, id); err != nil {
		return fmt.Errorf("set tap %d of sandbox %d: %w", v.Ifindex, id, err)
	}
	return nil
}

// lead makes a key lead to a sandbox, if it leads to no other.
func lead(m *ebpf.Map, key uint32, id ID) error {
	err := m.Update(key, uint32(id), ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		var to uint32
		if err := m.Lookup(key, &to); err == nil && ID(to) == id {
			return nil
		}
		return fmt.Errorf("another sandbox has it: %w", errdefs.ErrAlreadyExists)
	}
	return err
}

// unlead makes a key lead to none.
func unlead(m *ebpf.Map, key uint32) error {
	if err := m.Delete(key); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// unleadAll does it for those keys that are stale.
func unleadAll(m *ebpf.Map, stale func(key uint32, to ID) bool) error {
	var key, id uint32
	var keys []uint32
	it := m.Iterate()
	for it.Next(&key, &id) {
		if stale(key, ID(id)) {
			keys = append(keys, key)
		}
	}
	errs := []error{it.Err()}
	for _, key := range keys {
		errs = append(errs, unlead(m, key))
	}
	return errors.Join(errs...)
}

// UpdateSandbox changes settings. Flows and counters stay.
func (d *Datapath) UpdateSandbox(id ID, s Settings) error {
	if err := s.validate(); err != nil {
		return err
	}
	value, unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	s.put(&value)
	return d.put(id, &value)
}

// RemoveSandbox closes the tap, then takes away all that the sandbox had, and returns what was counted. When it fails the
// tap may be closed; it can be called again. errdefs.ErrNotFound if there is no such sandbox; what one has left that
// was being added or removed when its process was killed is gone then, too.
func (d *Datapath) RemoveSandbox(id ID) (Counters, error) {
	if !id.valid() {
		return nil, notFound(id)
	}
	d.turns[id].Lock()
	defer d.turns[id].Unlock()
	value, err := d.get(id)
	if err != nil {
		return nil, err
	}
	// The rows first: only the sandbox, which is closed then, leads to them.
	rows, err := d.rowsOf(value.Gen)
	if err != nil {
		return nil, err
	}
	if err := d.closeSandbox(id, &value); err != nil {
		return nil, err
	}
	if err := errors.Join(d.deleteFlows(id), d.deleteFragments(value.HostIp), d.deleteRows(rows)); err != nil {
		return nil, err
	}
	if value.Ifindex == 0 {
		return nil, notFound(id)
	}
	return d.counters(id)
}

// CheckSandbox verifies that the programs find a sandbox by its device and its address. errdefs.ErrFailedPrecondition if not.
func (d *Datapath) CheckSandbox(id ID, ifindex int, host netip.Addr) error {
	value, unlock, err := d.lock(id)
	if errdefs.IsNotFound(err) {
		return fmt.Errorf("the datapath has no sandbox %d: %w", id, errdefs.ErrFailedPrecondition)
	} else if err != nil {
		return err
	}
	defer unlock()
	if value.Ifindex != uint32(ifindex) || value.HostIp != ip4(host) {
		return fmt.Errorf("sandbox %d has device %d and address %v, not %d and %v: %w", id, value.Ifindex, addrOf(value.HostIp), ifindex, host, errdefs.ErrFailedPrecondition)
	}
	for what, m := range map[string]*ebpf.Map{"tap": d.objs.Taps, "address": d.objs.Addresses} {
		key := map[string]uint32{"tap": value.Ifindex, "address": value.HostIp}[what]
		var to uint32
		if err := m.Lookup(key, &to); err != nil || ID(to) != id {
			return fmt.Errorf("the %s of sandbox %d leads to %d (%v): %w", what, id, to, err, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// Sandboxes lists the sandboxes by the devices they have.
func (d *Datapath) Sandboxes() (map[int]ID, error) {
	values, err := d.all()
	if err != nil {
		return nil, err
	}
	all := make(map[int]ID, len(values))
	for id, v := range values {
		all[int(v.Ifindex)] = id
	}
	return all, nil
}

// all reads all sandboxes.
func (d *Datapath) all() (map[ID]dpSandbox, error) {
	all := map[ID]dpSandbox{}
	for id := ID(1); id <= MaxSandboxes; id++ {
		v, err := d.get(id)
		if err != nil {
			return nil, err
		}
		if v.Ifindex != 0 {
			all[id] = v
		}
	}
	return all, nil
}

// get reads a sandbox; one without a device isn't there.
func (d *Datapath) get(id ID) (dpSandbox, error) {
	var v dpSandbox
	if err := d.objs.Sandboxes.LookupWithFlags(uint32(id), &v, ebpf.LookupLock); err != nil {
		return v, fmt.Errorf("read sandbox %d: %w", id, err)
	}
	return v, nil
}

// lock returns a sandbox, on which it is the caller's turn until unlock.
func (d *Datapath) lock(id ID) (v dpSandbox, unlock func(), err error) {
	if !id.valid() {
		return v, nil, notFound(id)
	}
	d.turns[id].Lock()
	v, err = d.get(id)
	if err == nil && v.Ifindex == 0 {
		err = notFound(id)
	}
	if err != nil {
		d.turns[id].Unlock()
		return v, nil, err
	}
	return v, d.turns[id].Unlock, nil
}

// put sets a sandbox in one step, as the programs see it.
func (d *Datapath) put(id ID, to *dpSandbox) error {
	if err := d.objs.Sandboxes.Update(uint32(id), to, ebpf.UpdateLock); err != nil {
		return fmt.Errorf("set sandbox %d: %w", id, err)
	}
	return nil
}

// closeSandbox lets nothing more through. When it returns no program has the sandbox in hands.
func (d *Datapath) closeSandbox(id ID, was *dpSandbox) error {
	if err := d.put(id, &dpSandbox{}); err != nil {
		return err
	}
	for _, lead := range []struct {
		from *ebpf.Map
		key  uint32
	}{{d.objs.Taps, was.Ifindex}, {d.objs.Addresses, was.HostIp}} {
		var err error
		if was.Ifindex != 0 {
			err = unlead(lead.from, lead.key)
		} else {
			err = unleadAll(lead.from, func(_ uint32, to ID) bool { return to == id })
		}
		if err != nil {
			return fmt.Errorf("close sandbox %d: %w", id, err)
		}
	}
	return waitPrograms()
}

// reset clears what an id's former owner used up and counted.
func (d *Datapath) reset(id ID) error {
	if err := d.objs.Meters.Update(uint32(id), &dpMeter{}, ebpf.UpdateLock); err != nil {
		return fmt.Errorf("reset meter %d: %w", id, err)
	}
	if err := d.objs.Closed.Put(uint32(id), uint32(0)); err != nil {
		return fmt.Errorf("reset closed flows %d: %w", id, err)
	}
	return d.resetCounters(id)
}

// serialTimeout bounds the wait for others who take a number, which is two accesses to a map.
const serialTimeout = 10 * time.Second

// next returns a number that no epoch or generation has had in the life of the maps.
func (d *Datapath) next() (uint32, error) {
	ctx, cancel := context.WithTimeout(context.Background(), serialTimeout)
	defer cancel()
	unlock, err := flock.LockDir(ctx, mapsDir(d.cfg.Dir), false)
	if err != nil {
		return 0, fmt.Errorf("wait for the next generation: %w", err)
	}
	defer unlock()
	var n uint32
	if err := d.objs.Serial.Lookup(uint32(0), &n); err != nil {
		return 0, fmt.Errorf("read the last generation: %w", err)
	}
	if n++; n == 0 {
		return 0, fmt.Errorf("all generations have been used; remove the datapath and set it up again: %w", errdefs.ErrResourceExhausted)
	}
	if err := d.objs.Serial.Put(uint32(0), n); err != nil {
		return 0, fmt.Errorf("record the generation: %w", err)
	}
	return n, nil
}
