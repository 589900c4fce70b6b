package bpf

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// eachHook runs a test with links and with filters.
func eachHook(t *testing.T, test func(t *testing.T, n *network)) {
	for name, clsact := range map[string]bool{"TCX": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			if !clsact {
				needTCX(t)
			}
			n := newNetwork(t)
			n.must(n.Close())
			n.cfg.Clsact = clsact
			n.open()
			test(t, n)
		})
	}
}

func hasTCX() bool {
	const loopback = 1 // in every network namespace
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXEgress})
	return err == nil
}

func needTCX(t *testing.T) {
	t.Helper()
	if !hasTCX() {
		t.Skip("SKIPPED: this kernel has no TCX")
	}
}

// way tells how the programs are attached, all of them the same way and no other.
func (l *live) way() string {
	l.t.Helper()
	ways := map[string]int{}
	hooks := []hook{{l.tap, tapIn}, {l.tap, tapOut}, {l.gateway.Attrs().Index, gwOut}}
	for _, h := range hooks {
		filter, err := firstFilter(h)
		l.must(err)
		if filter != 0 {
			ways["clsact"]++
		}
		if !hasTCX() {
			continue
		}
		program, err := firstTCX(h)
		l.must(err)
		if program != 0 {
			ways["TCX"]++
		}
	}
	for way, n := range ways {
		if len(ways) == 1 && n == len(hooks) {
			return way
		}
	}
	l.t.Fatalf("attached: %v; want all of %d hooks one way", ways, len(hooks))
	return ""
}

// TestBestWay: where nothing else is asked for, programs are attached by TCX if the kernel has it, and else by clsact.
func TestBestWay(t *testing.T) {
	l := newLive(t, newNetwork(t))
	l.must(l.check())
	l.roundTrip("the best way")
	want := "clsact"
	if hasTCX() {
		want = "TCX"
	}
	way := l.way()
	if way != want {
		t.Errorf("attached by %s, not %s", way, want)
	}
	t.Logf("programs are attached by %s", way)
}

// TestOtherWay: hooks that were attached one way and are the other way are so once, without a break.
func TestOtherWay(t *testing.T) {
	needTCX(t)
	eachHook(t, func(t *testing.T, n *network) {
		l := newLive(t, n)
		l.roundTrip("one way")
		l.must(l.Close())
		n.cfg.Clsact = !n.cfg.Clsact
		l.open()
		l.must(l.AttachTap(l.tap))
		l.must(l.AttachGateway())
		l.must(l.check())
		l.roundTrip("the other way")
		if way := l.way(); (way == "clsact") != n.cfg.Clsact {
			t.Errorf("attached by %s", way)
		}
	})
}
