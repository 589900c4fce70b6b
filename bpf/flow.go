package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// FlowKey tells a sandbox's flows apart. Ports are 0 where the protocol has none; an echo's identifier is the port of who
// asks.
type FlowKey struct {
	Remote     netip.Addr
	RemotePort uint16
	GuestPort  uint16
	Protocol   uint8
}

// Flow is a flow as it was seen.
type Flow struct {
	FlowKey
	Inbound            bool          // the host opened it
	Rule               uint16        // of the policy, that let it be opened
	Idle               time.Duration // since the last packet
	State              FlowState
	TXPackets, TXBytes uint64
	RXPackets, RXBytes uint64
}

// FlowState is how far a flow is.
type FlowState string

// The states. Only TCP flows are closing.
const (
	FlowOpening FlowState = "opening" // nothing came back yet
	FlowOpen    FlowState = "open"
	FlowClosing FlowState = "closing" // both sides are done, or one broke it off
)

// Timeouts are how long flows may be idle before they are forgotten.
type Timeouts struct {
	TCPOpening, TCPOpen, TCPClosing time.Duration
	UDPOpening, UDPOpen             time.Duration
	ICMP                            time.Duration
}

// DefaultTimeouts are those of most NATs; open TCP connections get more than the 2 hours between the kernel's keep-alives.
var DefaultTimeouts = Timeouts{
	TCPOpening: time.Minute, TCPOpen: 3 * time.Hour, TCPClosing: 30 * time.Second,
	UDPOpening: 30 * time.Second, UDPOpen: 3 * time.Minute,
	ICMP: 30 * time.Second,
}

// limit returns how long a flow may be idle.
func (t Timeouts) limit(f Flow) time.Duration {
	switch {
	case f.Protocol == unix.IPPROTO_TCP && f.State == FlowClosing:
		return t.TCPClosing
	case f.Protocol == unix.IPPROTO_TCP && f.State == FlowOpening:
		return t.TCPOpening
	case f.Protocol == unix.IPPROTO_TCP:
		return t.TCPOpen
	case f.Protocol == unix.IPPROTO_UDP && f.State == FlowOpening:
		return t.UDPOpening
	case f.Protocol == unix.IPPROTO_UDP:
		return t.UDPOpen
	}
	return t.ICMP
}

// The bits of a flow's state, as dp/abi.h has them.
const (
	seenTX = 1 << iota
	seenRX
	finTX
	finRX
	rst
)

func flowOf(k *dpFlowKey, v *dpFlow, now time.Duration) Flow {
	f := Flow{
		FlowKey: FlowKey{Remote: addrOf(k.RemoteIp), RemotePort: port(k.RemotePort), GuestPort: port(k.GuestPort), Protocol: k.Proto},
		Inbound: v.Decision.Dir != 0, Rule: v.Decision.Rule, Idle: max(0, now-time.Duration(v.Last)), State: FlowOpening,
		TXPackets: v.TxPackets, TXBytes: v.TxBytes, RXPackets: v.RxPackets, RXBytes: v.RxBytes,
	}
	switch {
	case v.State&rst != 0 || v.State&(finTX|finRX) == finTX|finRX:
		f.State = FlowClosing
	case v.State&(seenTX|seenRX) == seenTX|seenRX:
		f.State = FlowOpen
	}
	return f
}

// Flows lists a sandbox's flows, in no order.
func (d *Datapath) Flows(id ID) ([]Flow, error) {
	var flows []Flow
	now := monotonic()
	err := d.walk(func(k *dpFlowKey, v *dpFlow) bool {
		if k.Id == uint32(id) {
			flows = append(flows, flowOf(k, v, now))
		}
		return false
	})
	return flows, err
}

// deleteFlows forgets all flows of a sandbox.
func (d *Datapath) deleteFlows(id ID) error {
	d.walks.Lock()
	defer d.walks.Unlock()
	var gone uint32
	err := d.walk(func(k *dpFlowKey, _ *dpFlow) bool {
		if k.Id != uint32(id) {
			return false
		}
		gone++
		return true
	})
	return errors.Join(err, d.addClosed(id, gone))
}

// flowBatch is how many flows are read by one call. A call reads whole buckets of the table, which have a flow or two each.
const flowBatch = 4096

// walk calls see for each flow and deletes those for which it returns true. Flows that come or go meanwhile may be seen or
// not. Those who delete hold d.walks.
func (d *Datapath) walk(see func(*dpFlowKey, *dpFlow) bool) error {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]dpFlowKey, flowBatch), make([]dpFlow, flowBatch)
	doomed := make([]dpFlowKey, 0, flowBatch)
	for {
		n, err := d.objs.Flows.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return fmt.Errorf("read flows: %w", err)
		}
		doomed = doomed[:0]
		for i := range n {
			if see(&keys[i], &values[i]) {
				doomed = append(doomed, keys[i])
			}
		}
		for len(doomed) > 0 {
			n, err := d.objs.Flows.BatchDelete(doomed, nil)
			if err == nil {
				break
			}
			if !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("delete flows: %w", err)
			}
			doomed = doomed[n+1:] // another process was there first
		}
		if last {
			return nil
		}
	}
}

// addClosed gives a sandbox's quota back what was deleted.
func (d *Datapath) addClosed(id ID, n uint32) error {
	if n == 0 {
		return nil
	}
	var closed uint32
	if err := d.objs.Closed.Lookup(uint32(id), &closed); err != nil {
		return fmt.Errorf("read closed flows of sandbox %d: %w", id, err)
	}
	return d.setClosed(id, closed+n)
}

func (d *Datapath) setClosed(id ID, n uint32) error {
	if err := d.objs.Closed.Put(uint32(id), n); err != nil {
		return fmt.Errorf("set closed flows of sandbox %d: %w", id, err)
	}
	return nil
}
