package bpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/undo"
)

// ID names a sandbox of the datapath while it is there; later it may name another one. 0 names none.
type ID uint32

// MaxSandboxes is how many there can be at a time.
const MaxSandboxes = 4096 - 1

// Sandbox is what belongs to a tap.
type Sandbox struct {
	Ifindex  int
	GuestIP  netip.Addr // any number of sandboxes may have the same
	GuestMAC net.HardwareAddr
	HostIP   netip.Addr // what the host knows it by; no two sandboxes have the same
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

// entry is a sandbox in the table. Its tap and address don't change, the rest is mu's. rows are those of its generation,
// retired those of generations before.
type entry struct {
	mu      sync.Mutex
	removed bool
	value   dpSandbox
	rows    []dpPolicyKey
	retired []dpPolicyKey
}

func (s Sandbox) validate() error {
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
// or the id's former owner is left. errdefs.ErrAlreadyExists if a sandbox has the tap or the host's address,
// errdefs.ErrResourceExhausted if there are too many.
func (d *Datapath) AddSandbox(s Sandbox, rows []policy.Row) (ID, error) {
	if err := s.validate(); err != nil {
		return 0, err
	}
	id, e, err := d.reserve(s)
	if err != nil {
		return 0, err
	}
	defer e.mu.Unlock()
	if err := d.openSandbox(id, e, rows); err != nil {
		e.removed = true
		d.release(id)
		return 0, err
	}
	return id, nil
}

func (d *Datapath) openSandbox(id ID, e *entry, rows []policy.Row) (err error) {
	var u undo.Stack
	defer u.Run(&err)
	if err := d.reset(id); err != nil {
		return err
	}
	if e.value.Epoch, err = d.next(); err != nil {
		return err
	}
	if len(rows) > 0 {
		if e.value.Gen, e.rows, err = d.putRows(rows); err != nil {
			return err
		}
		u.Push(func() error { return d.deleteRows(e.rows) })
	}
	u.Push(func() error { return d.closeSandbox(id, e) })
	if err := d.put(id, &e.value); err != nil {
		return err
	}
	if err := d.objs.Addresses.Put(e.value.HostIp, uint32(id)); err != nil {
		return fmt.Errorf("set the sandbox's address: %w", err)
	}
	if err := d.objs.Taps.Put(e.value.Ifindex, uint32(id)); err != nil {
		return fmt.Errorf("set the sandbox's tap: %w", err)
	}
	return nil
}

// UpdateSandbox changes settings. Flows and counters stay.
func (d *Datapath) UpdateSandbox(id ID, s Settings) error {
	if err := s.validate(); err != nil {
		return err
	}
	e, err := d.lock(id)
	if err != nil {
		return err
	}
	defer e.mu.Unlock()
	changed := e.value
	s.put(&changed)
	if err := d.put(id, &changed); err != nil {
		return err
	}
	s.put(&e.value)
	return nil
}

// RemoveSandbox closes the tap, then takes away all that the sandbox had, and returns what was counted. When it fails the
// tap may be closed; it can be called again. errdefs.ErrNotFound if there is no such sandbox.
func (d *Datapath) RemoveSandbox(id ID) (Counters, error) {
	e, err := d.lock(id)
	if err != nil {
		return nil, err
	}
	defer e.mu.Unlock()
	if err := d.closeSandbox(id, e); err != nil {
		return nil, err
	}
	if err := d.deleteFlows(id, func(FlowKey) bool { return true }); err != nil {
		return nil, err
	}
	if err := d.deleteRows(append(e.rows, e.retired...)); err != nil {
		return nil, err
	}
	counters, err := d.counters(id)
	if err != nil {
		return nil, err
	}
	e.removed = true
	d.release(id)
	return counters, nil
}

// Sandboxes lists the sandboxes by the devices they have. One that its adder was killed over may be among them.
func (d *Datapath) Sandboxes() map[int]ID {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make(map[int]ID, len(d.sandboxes))
	for id, e := range d.sandboxes {
		all[int(e.value.Ifindex)] = id
	}
	return all
}

// reserve puts a sandbox into the table, locked, under an id that nobody has.
func (d *Datapath) reserve(s Sandbox) (ID, *entry, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var free ID
	for id := ID(1); id <= MaxSandboxes; id++ {
		e, ok := d.sandboxes[id]
		if !ok {
			if free == 0 {
				free = id
			}
			continue
		}
		if e.value.Ifindex == uint32(s.Ifindex) || e.value.HostIp == ip4(s.HostIP) {
			return 0, nil, fmt.Errorf("sandbox %d has device %d and address %v: %w", id, e.value.Ifindex, addrOf(e.value.HostIp), errdefs.ErrAlreadyExists)
		}
	}
	if free == 0 {
		return 0, nil, fmt.Errorf("there are %d sandboxes, which is the most: %w", MaxSandboxes, errdefs.ErrResourceExhausted)
	}
	e := &entry{value: dpSandbox{
		Ifindex: uint32(s.Ifindex), Id: uint32(free), GuestIp: ip4(s.GuestIP), HostIp: ip4(s.HostIP), GuestMac: [6]byte(s.GuestMAC),
	}}
	s.put(&e.value)
	e.mu.Lock()
	d.sandboxes[free] = e
	return free, e, nil
}

func (d *Datapath) release(id ID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.sandboxes, id)
}

// lock returns a sandbox, whose mutex the caller has then.
func (d *Datapath) lock(id ID) (*entry, error) {
	d.mu.Lock()
	e, ok := d.sandboxes[id]
	d.mu.Unlock()
	if ok {
		e.mu.Lock()
		if !e.removed {
			return e, nil
		}
		e.mu.Unlock()
	}
	return nil, fmt.Errorf("sandbox %d: %w", id, errdefs.ErrNotFound)
}

// put sets a sandbox in one step, as the programs see it.
func (d *Datapath) put(id ID, to *dpSandbox) error {
	if err := d.objs.Sandboxes.Update(uint32(id), to, ebpf.UpdateLock); err != nil {
		return fmt.Errorf("set sandbox %d: %w", id, err)
	}
	return nil
}

// closeSandbox lets nothing more through. When it returns no program has the sandbox in hands.
func (d *Datapath) closeSandbox(id ID, e *entry) error {
	if err := d.put(id, &dpSandbox{}); err != nil {
		return err
	}
	if err := d.objs.Taps.Delete(e.value.Ifindex); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("close tap %d: %w", e.value.Ifindex, err)
	}
	if err := d.objs.Addresses.Delete(e.value.HostIp); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove address %v: %w", addrOf(e.value.HostIp), err)
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

// next returns a number that no epoch or generation has had in the life of the maps.
func (d *Datapath) next() (uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.serial + 1
	if n == 0 {
		return 0, fmt.Errorf("all generations have been used; remove the datapath and set it up again: %w", errdefs.ErrResourceExhausted)
	}
	if err := d.objs.Serial.Put(uint32(0), n); err != nil {
		return 0, fmt.Errorf("record the generation: %w", err)
	}
	d.serial = n
	return n, nil
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// waitPrograms returns when every program that was running has ended: programs run within RCU, for whose grace period the
// call waits. Kernels with nohz_full don't have the call.
func waitPrograms() error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return fmt.Errorf("wait for running programs (membarrier; it takes a kernel started without nohz_full): %w", errno)
	}
	return nil
}
