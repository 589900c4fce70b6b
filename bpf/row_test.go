package bpf

import (
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf/policy"
)

// TestPolicyChange: another policy holds for live flows at their next packet.
func TestPolicyChange(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", "tcp"))
	s.expect(s.send(tcpFromGuest(remote, 1000, 443, syn)), tcRedirect, TX)
	for range 3 {
		s.must(s.SetPolicy(s.id, s.rows(allow("1.0.0.0/8", "udp"))))
		s.expect(s.send(tcpFromGuest(remote, 1000, 443, ack)), tcShot, Policy)
		s.expect(s.send(tcpFromGuest(remote, 1001, 443, syn)), tcShot, Policy)
		s.must(s.SetPolicy(s.id, s.rows(allow("1.0.0.0/8", "tcp"))))
		s.expect(s.send(tcpFromGuest(remote, 1000, 443, ack)), tcRedirect, TX)
	}
	s.must(s.SetPolicy(s.id, nil))
	s.expect(s.send(tcpFromGuest(remote, 1000, 443, ack)), tcShot, Policy)
	if n := s.policyRows(); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	if err := s.SetPolicy(99, nil); !errdefs.IsNotFound(err) {
		t.Errorf("policy of no sandbox: %v", err)
	}
}

// TestNoNumberTwice: when all epochs and generations have been given out none is given out again. What is in force stays so.
func TestNoNumberTwice(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	s.must(s.objs.Serial.Put(uint32(0), uint32(math.MaxUint32)))
	for range 2 {
		if err := s.SetPolicy(s.id, s.rows(allow("2.0.0.0/8", ""))); !errdefs.IsResourceExhausted(err) {
			t.Errorf("another policy: %v", err)
		}
	}
	s.expect(s.send(udpFromGuest(remote, 1000, 1, "")), tcRedirect, TX)
	_, err := s.RemoveSandbox(s.id)
	s.must(err)
	if _, err := s.add(unlimited(s.tap), nil); !errdefs.IsResourceExhausted(err) {
		t.Errorf("another sandbox: %v", err)
	}
	if got := s.sandboxes(); len(got) != 0 {
		t.Errorf("sandboxes %v", got)
	}
}

// TestManyRows: a policy for which there is no room is refused, and changes nothing.
func TestManyRows(t *testing.T) {
	s := newSandboxed(t, nil)
	spec, err := loadDp()
	s.must(err)
	small := spec.Maps[dpMapPolicy].Copy()
	small.MaxEntries, small.Pinning = 8, ebpf.PinNone
	m, err := ebpf.NewMap(small)
	s.must(err)
	large := s.objs.Policy
	s.objs.Policy = m
	t.Cleanup(func() {
		s.objs.Policy = large
		_ = m.Close()
	})
	s.must(s.SetPolicy(s.id, []policy.Row{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}))
	rows := s.policyRows()
	var many []policy.Row
	for i := range 9 {
		many = append(many, policy.Row{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{1, 1, 1, byte(i)}), 32)})
	}
	if err := s.SetPolicy(s.id, many); !errdefs.IsResourceExhausted(err) {
		t.Error(err)
	}
	if got := s.policyRows(); got != rows {
		t.Errorf("%d rows, not %d", got, rows)
	}
}

func (n *network) policyRows() (rows int) {
	var k dpPolicyKey
	var v dpVerdict
	it := n.objs.Policy.Iterate()
	for it.Next(&k, &v) {
		rows++
	}
	n.must(it.Err())
	return rows
}
