package bpf

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf/policy"
)

// TestRecover: who opens the datapath after a kill removes what was left half done.
func TestRecover(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcRedirect, TX)
	rows := s.policyRows()
	// A policy that was not set, and a sandbox that was closed, but not removed.
	_, _, err := s.putRows(s.rows(allow("2.0.0.0/8", "")))
	s.must(err)
	_, tap1 := s.network.tap("tap1")
	other := unlimited(tap1)
	other.HostIP = hostIP.Next()
	id1, err := s.add(other, s.rows(allow("1.0.0.0/8", "")))
	s.must(err)
	s.expect(s.feed(s.objs.TapIn, id1, tap1, 0, 0, udpFromGuest(remote, 1, 1, "").bytes()), tcRedirect, TX)
	s.must(s.put(id1, &dpSandbox{}))
	old, err := s.next()
	s.must(err)
	s.must(s.Close())

	s.open()
	if got := s.policyRows(); got != rows {
		t.Errorf("%d rows, not %d", got, rows)
	}
	if got := s.sandboxes(); len(got) != 1 {
		t.Errorf("sandboxes %v", got)
	}
	all := 0
	s.must(s.walk(func(*dpFlowKey, *dpFlow) bool { all++; return false }))
	if all != 1 {
		t.Errorf("%d flows", all)
	}
	var id uint32
	for _, m := range []*ebpf.Map{s.objs.Taps, s.objs.Addresses} {
		if err := m.Lookup(map[*ebpf.Map]uint32{s.objs.Taps: uint32(tap1), s.objs.Addresses: ip4(other.HostIP)}[m], &id); !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Errorf("%s leads to %d, %v", m, id, err)
		}
	}
	// No generation is given out twice.
	gen, err := s.next()
	if err != nil || gen != old+1 {
		t.Errorf("generation %d after %d, %v", gen, old, err)
	}
}

// TestRemoveHalf: of a sandbox whose process was killed while it removed or added it nothing is in the way of the next one,
// once it is removed, again or after all.
func TestRemoveHalf(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	for _, half := range []struct {
		name string
		kill func()
	}{
		{"removed", func() {
			s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcRedirect, TX)
			s.must(s.put(s.id, &dpSandbox{}))
		}},
		{"added", func() {
			_, err := s.RemoveSandbox(s.id)
			s.must(err)
			s.must(lead(s.objs.Addresses, ip4(hostIP), s.id))
			s.must(lead(s.objs.Taps, uint32(s.tap), s.id))
		}},
	} {
		half.kill()
		if _, err := s.RemoveSandbox(s.id); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", half.name, err)
		}
		flows := 0
		s.must(s.walk(func(*dpFlowKey, *dpFlow) bool { flows++; return false }))
		if flows != 0 {
			t.Errorf("%s: %d flows are left", half.name, flows)
		}
		var err error
		if s.id, err = s.add(unlimited(s.tap), s.rows(allow("1.0.0.0/8", ""))); err != nil {
			t.Fatalf("%s: %v", half.name, err)
		}
		s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcRedirect, TX)
	}
}

// TestUse: what another process has loaded can be used as if it were one's own.
func TestUse(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	none := s.cfg
	none.Dir = filepath.Join(t.TempDir(), "bpf")
	if _, err := Use(none); !errdefs.IsUnavailable(err) {
		t.Errorf("used what isn't there: %v", err)
	}
	rows := s.policyRows()
	began := time.Now()
	other, err := Use(s.cfg)
	s.must(err)
	t.Logf("opened in %v", time.Since(began))
	defer other.Close()
	_, tap1 := s.network.tap("tap1")
	s.must(other.AttachTap(tap1))
	s.must(s.CheckTap(tap1))
	sb := unlimited(tap1)
	sb.HostIP = hostIP.Next()
	s.must(other.AddSandbox(sb, s.rows(allow("1.0.0.0/8", ""), allow("2.2.0.0/16", "tcp", "1-5"))))
	s.expect(s.feed(s.objs.TapIn, sb.ID, tap1, 0, 0, udpFromGuest(remote, 1, 1, "").bytes()), tcRedirect, TX)
	s.must(s.SetPolicy(sb.ID, s.rows(allow("3.0.0.0/8", ""))))
	s.expect(s.feed(s.objs.TapIn, sb.ID, tap1, 0, 0, udpFromGuest(remote, 1, 1, "").bytes()), tcShot, Policy)
	if c, err := other.RemoveSandbox(sb.ID); err != nil || c[TX].Packets != 1 || c[Policy].Packets != 1 {
		t.Errorf("counted %v, %v", c, err)
	}
	if got := s.policyRows(); got != rows {
		t.Errorf("%d rows, not %d", got, rows)
	}
	s.must(s.DetachTap(tap1))
	// Another process's programs are used once they are there.
	s.open()
	if err := other.CheckTap(s.tap); err == nil {
		t.Error("a tap without programs is all right")
	}
	s.must(s.AttachTap(s.tap))
	if err := other.CheckTap(s.tap); err == nil {
		t.Error("the process before has the programs of the one after")
	}
	again, err := Use(s.cfg)
	s.must(err)
	defer again.Close()
	s.must(again.CheckTap(s.tap))
}

// TestRowsOf: the rows of a generation are found, all of them and no others.
func TestRowsOf(t *testing.T) {
	n := newNetwork(t)
	var prefixes [][]policy.Row
	gens := map[uint32]int{}
	for _, words := range []string{"", "0.0.0.0/1", "0.0.0.0/0 0.0.0.0/32 0.0.0.1/32 128.0.0.0/1", "0.0.0.1/32", "255.255.255.255/32 0.0.0.0/31", "10.0.0.0/8 10.0.0.0/9 10.128.0.0/9 10.0.0.0/32 11.0.0.0/8 0.0.0.0/8"} {
		rows := []policy.Row{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}
		for _, w := range strings.Fields(words) {
			rows = append(rows, policy.Row{Prefix: netip.MustParsePrefix(w)})
		}
		prefixes = append(prefixes, rows)
	}
	for range 50 {
		for _, rows := range prefixes {
			gen, _, err := n.putRows(rows)
			n.must(err)
			var key dpPolicyKey
			var value dpVerdict
			it := n.objs.Policy.Iterate()
			want := 0
			for it.Next(&key, &value) {
				if key.Gen == gen {
					want++
				}
			}
			n.must(it.Err())
			gens[gen] = want
		}
	}
	for gen, want := range gens {
		keys, err := n.rowsOf(gen)
		n.must(err)
		if len(keys) != want {
			t.Fatalf("%d rows of generation %d, not %d: %v", len(keys), gen, want, keys)
		}
		if gen%2 == 0 {
			n.must(n.deleteRows(keys))
		}
	}
	key, value, left := dpPolicyKey{}, dpVerdict{}, map[uint32]int{}
	for it := n.objs.Policy.Iterate(); it.Next(&key, &value); {
		left[key.Gen]++
	}
	for gen, want := range gens {
		if gen%2 == 0 && left[gen] != 0 || gen%2 != 0 && left[gen] != want {
			t.Errorf("%d rows of generation %d are left of %d", left[gen], gen, want)
		}
	}
}

// TestIncompatible: maps that these programs can't use are told of, with the way out, and others' directories are dropped
// only when asked for.
func TestIncompatible(t *testing.T) {
	n := newNetwork(t)
	n.must(n.Close())
	dir := mapsDir(n.cfg.Dir)
	n.must(os.Remove(filepath.Join(dir, dpMapFlows)))
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: dpMapFlows, Type: ebpf.Hash, KeySize: 8, ValueSize: 8, MaxEntries: 8})
	n.must(err)
	n.must(m.Pin(filepath.Join(dir, dpMapFlows)))
	n.must(m.Close())
	if _, err := Open(n.cfg); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("opened with other maps: %v", err)
	}
	old := filepath.Join(n.cfg.Dir, "maps-v0")
	n.must(os.Rename(dir, old))
	n.open()
	if _, err := os.Stat(old); err != nil {
		t.Error(err)
	}
	n.must(n.DropOldLayouts())
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("old maps are left: %v", err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}

func TestReaperEnds(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcRedirect, TX)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		s.RunReaper(ctx, time.Millisecond, Timeouts{})
		close(done)
	}()
	for end := time.Now().Add(wait); len(s.flows()) > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if n := len(s.flows()); n != 0 {
		t.Errorf("%d flows are left", n)
	}
	cancel()
	select {
	case <-done:
	case <-time.After(wait):
		t.Error("the reaper doesn't end")
	}
}

func TestConfig(t *testing.T) {
	good := Config{Dir: "/run/x", Gateway: Gateway{Ifindex: 1, IP: gatewayIP, MAC: gatewayMAC}, Marks: marks}
	if err := good.validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Config){
		"relative directory": func(c *Config) { c.Dir = "x" },
		"root":               func(c *Config) { c.Dir = "/" },
		"no gateway":         func(c *Config) { c.Gateway = Gateway{} },
		"mark 0":             func(c *Config) { c.Marks.Direct = 0 },
		"equal marks":        func(c *Config) { c.Marks.Direct = c.Marks.Proxy },
		"mark beyond mask":   func(c *Config) { c.Marks.Guest = 0x10000 },
		"rate without burst": func(c *Config) { c.Events = Rate{PerSecond: 1} },
	} {
		c := good
		change(&c)
		if err := c.validate(); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
