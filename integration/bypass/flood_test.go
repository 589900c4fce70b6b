package bypass

import (
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/internal/config"
)

// TestManyFlows: a sandbox that opens flows as fast as it can has as many as it may, here and in the kernel's table, and
// another one has what it needs.
func TestManyFlows(t *testing.T) {
	const most, flood = 1000, 20000
	w := newWorld(t, strict, func(c *config.Config) { c.Network.MaxFlows = most })
	for _, tc := range []struct {
		name  string
		frame func(i uint16) []byte
	}{
		{"UDP", func(i uint16) []byte { return fromGuest(udp(at(guestIP, 20000+i), at(ok, 9999), "")) }},
		{"TCP", func(i uint16) []byte { return fromGuest(tcp(at(guestIP, 20000+i), at(ok, 80), syn, 1, 0, "")) }},
		{"echoes", func(i uint16) []byte { return fromGuest(icmp(guestIP, ok, 8, 0, uint32(i)<<16, make([]byte, 128))) }},
	} {
		s := w.sandbox(tc.name, strict)
		begin := time.Now()
		for i := range uint16(flood) {
			must(t, w.send(s, vnet{}, tc.frame(i)))
			if i%1000 == 0 {
				w.barrier(w.b)
			}
		}
		w.barrier(w.b)
		counts := w.counts(s)
		if counts[bpf.TX] == 0 || counts[bpf.TX] > most {
			t.Errorf("%s: %d flows were opened", tc.name, counts[bpf.TX])
		}
		if n := counts[bpf.TX] + counts[bpf.FlowQuota] + counts[bpf.FlowRate] + counts[bpf.EchoRate]; n != flood {
			t.Errorf("%s: %d of %d frames were counted: %v", tc.name, n, flood, counts)
		}
		if most := 64 + int(64*time.Since(begin).Seconds()+1); tc.name == "echoes" && counts[bpf.TX] > most {
			t.Errorf("%d echoes passed, at most %d may", counts[bpf.TX], most)
		}
		all, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
		must(t, err)
		entries := 0
		for _, f := range all {
			if f.Forward.SrcIP.Equal(s.at.Address.AsSlice()) {
				entries++
			}
		}
		if entries != counts[bpf.TX] {
			t.Errorf("%s: %d connections in the kernel's table, %d flows", tc.name, entries, counts[bpf.TX])
		}
		t.Logf("%s: %v in %s", tc.name, counts, time.Since(begin))
	}
}

// TestManyBytes: what leaves is within the sandbox's limit, however its frames are to be cut.
func TestManyBytes(t *testing.T) {
	limit := bpf.Rate{PerSecond: 1 << 20, Burst: 1 << 17}
	payload := func(n int) []byte { return fromGuest(udp(at(guestIP, 4000), at(ok, 9999), string(make([]byte, n)))) }
	w := newWorld(t, strict)
	for _, tc := range []struct {
		name   string
		header vnet
		frame  []byte
		n      int
	}{
		{"frames", vnet{}, payload(1400), 3000},
		{"small frames", vnet{}, payload(0), 10000},
		{"segments", vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 1400, csumStart: l4, csumOffset: 6}, payload(28000), 300},
		{"small segments", vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 30, csumStart: l4, csumOffset: 6}, payload(3000), 1000},
	} {
		s := w.sandbox(strings.ReplaceAll(tc.name, " ", "-"), strict, limit)
		begin := time.Now()
		bytes := 0
		for i := range tc.n {
			must(t, w.send(s, tc.header, tc.frame))
			if i%100 == 99 {
				bytes += w.wireBytes()
				w.barrier(w.b)
			}
		}
		w.barrier(w.b)
		bytes += w.wireBytes()
		elapsed := time.Since(begin)
		if most := int(limit.Burst) + int(float64(limit.PerSecond)*elapsed.Seconds()); bytes > most {
			t.Errorf("%s: %d bytes left, %d may", tc.name, bytes, most)
		}
		counts := w.counts(s)
		if counts[bpf.TX] == 0 || counts[bpf.TX]+counts[bpf.TXRate] != tc.n {
			t.Errorf("%s: counted %v of %d", tc.name, counts, tc.n)
		}
		t.Logf("%s: %d bytes in %s, %v", tc.name, bytes, elapsed, counts)
	}
}

// wireBytes are those of what is seen on the wire since, but for barriers.
func (w *world) wireBytes() (n int) {
	for _, f := range w.see(w.wire) {
		if !isBarrier(f) {
			n += len(f)
		}
	}
	dropped, err := unix.GetsockoptTpacketStats(w.wire.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	must(w.t, err)
	if dropped.Drops > 0 {
		w.t.Fatalf("%d frames on the wire were not seen", dropped.Drops)
	}
	return n
}
