package traffic

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/integration/testhost"
)

// flooding sends datagrams to one port after the other, each a flow of its own, as fast as it can for a while.
const flooding = `
import socket, time
s = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(8)]
end, n = time.monotonic() + %d, 0
while time.monotonic() < end:
    for c in s:
        try: c.sendto(b"flood", (%q, 10000 + n %% 50000))
        except OSError: pass
    n += 1
`

// TestFlood: a box that opens flows as fast as it can gets as many as it may, and neither the host's table nor another box's
// connections suffer by it.
func TestFlood(t *testing.T) {
	const lasts = 6 * time.Second
	a := newBox(t, "flooding", policed(testhost.Server.String())...)
	b := newBox(t, "other", policed(testhost.Server.String())...)
	connect := fmt.Sprintf(`for i in 1 2 3 4 5; do exec 3<>/dev/tcp/%s/%d && echo $i >&3 && read -r -t 10 line <&3 && echo $line; done`, testhost.Server, testhost.DataPort)
	before := a.counters(t)
	a.start(t, fmt.Sprintf(flooding, int(lasts.Seconds()), testhost.Server))
	limits := []bpf.Reason{bpf.FlowRate, bpf.FlowQuota}
	dropped := func() (n uint64) {
		c := a.counters(t)
		for _, r := range limits {
			n += c[r].Packets - before[r].Packets
		}
		return n
	}
	s.Eventually(t, patience, "more flows than there may be", func() bool { return dropped() > 100 })
	began := time.Now()
	if got := b.sh(connect); got != "1\n2\n3\n4\n5" {
		t.Errorf("meanwhile the other one gets %q", got)
	}
	t.Logf("five connections of the other one took %v", time.Since(began))
	most := 0
	look := time.NewTicker(lasts / 20)
	defer look.Stop()
	for range 20 {
		n := len(connections(t, a.place.Address))
		most = max(most, n)
		if limit := int(s.Config.Network.MaxFlows); n > limit {
			t.Fatalf("the host's table has %d connections of the flooding box, %d may be", n, limit)
		}
		<-look.C
	}
	c := a.counters(t)
	t.Logf("it has sent %d, %d were against its rate of flows and %d against their number; %d connections in the host's table",
		c[bpf.TX].Packets, c[bpf.FlowRate].Packets, c[bpf.FlowQuota].Packets, most)
	if most < 100 {
		t.Errorf("the host's table had %d connections of the flooding box at most", most)
	}
	for _, r := range []bpf.Reason{bpf.Policy, bpf.HardDeny} {
		if c[r].Packets != before[r].Packets {
			t.Errorf("%d packets were dropped as of %v: they were allowed", c[r].Packets-before[r].Packets, r)
		}
	}
	if got := answered(t, b); got != "still here" {
		t.Errorf("after the flood the other one gets %q", got)
	}
}

// answered is what the internet's server answers a box.
func answered(t *testing.T, b *box) string {
	t.Helper()
	return b.sh(reach(testhost.Server))
}

// reach is a script that has the internet's server answer.
func reach(server netip.Addr) string {
	return fmt.Sprintf(`exec 3<>/dev/tcp/%s/%d && echo still here >&3 && read -r -t 10 line <&3 && echo $line`, server, testhost.DataPort)
}
