package traffic

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/health"
)

// patience is for what happens.
const patience = 30 * time.Second

// box is a container of the stack's.
type box struct {
	id    string
	place *network.Attachment
}

// newBox runs one with flags of cube run. It does what it is told.
func newBox(t *testing.T, name string, flags ...string) *box {
	t.Helper()
	b := &box{id: s.ID(t, name)}
	args := append([]string{"run", "-d", "--name", b.id}, flags...)
	cube(t, append(args, stack.Image, "sleep", "infinity")...)
	t.Cleanup(func() { s.Cube("rm", "-f", b.id) }) // it may be gone
	var err error
	b.place, err = onNetwork(func(n *network.Network) (*network.Attachment, error) { return n.Find(t.Context(), "default", b.id) })
	must(t, err)
	return b
}

// cube runs cube, which must succeed.
func cube(t *testing.T, args ...string) stack.Result {
	t.Helper()
	r := s.Cube(args...)
	if r.Err != nil {
		t.Fatalf("cube %s: %v", strings.Join(args, " "), r.Err)
	}
	return r
}

// sh is what a shell in the box prints, whatever becomes of it.
func (b *box) sh(script string) string {
	return strings.TrimSpace(s.Cube("exec", b.id, "bash", "-c", "exec 2>&1; "+script).Stdout)
}

// start has the box run Python code on, beside what else it does; it is to print nothing.
func (b *box) start(t *testing.T, code string) {
	t.Helper()
	// Its own parent is gone before it begins, so that no client of the stack has to stay.
	cube(t, "exec", b.id, "sh", "-c", `nohup setsid python3 -c "$0" </dev/null >/tmp/said 2>&1 &`, code)
	t.Cleanup(func() {
		if said := b.sh("cat /tmp/said"); t.Failed() && said != "" {
			t.Logf("%s has said: %s", b.id, said)
		}
	})
}

// counters are the box's.
func (b *box) counters(t *testing.T) bpf.Counters {
	t.Helper()
	c, err := onNetwork(func(n *network.Network) (bpf.Counters, error) { return n.Counters(t.Context(), b.place.Key) })
	must(t, err)
	return c
}

// onNetwork calls f with the stack's network.
func onNetwork[T any](f func(*network.Network) (T, error)) (v T, err error) {
	err = s.Host.Do(func() (err error) {
		v, err = f(network.New(s.Config))
		return err
	})
	return v, err
}

// connections are those of the host's table that an address has opened, or that lead to it.
func connections(t *testing.T, of netip.Addr) (found []string) {
	t.Helper()
	must(t, s.Host.Do(func() error {
		all, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
		for _, f := range all {
			if f.Forward.SrcIP.Equal(of.AsSlice()) || f.Forward.DstIP.Equal(of.AsSlice()) {
				found = append(found, f.String())
			}
		}
		return err
	}))
	return found
}

// device is one of the host's.
func device(t *testing.T, name string) (l netlink.Link) {
	t.Helper()
	must(t, s.Host.Do(func() (err error) {
		l, err = netlink.LinkByName(name)
		return err
	}))
	return l
}

// up is the pid of `cube up`, 0 while there is none.
func up() int {
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(5*time.Second))
	defer cancel()
	r, _ := health.Query(ctx, s.Config.ControlSocket())
	return r.PID
}

// dial connects from the host.
func dial(t *testing.T, to netip.AddrPort) (c net.Conn, err error) {
	t.Helper()
	err = s.Host.Do(func() (err error) {
		c, err = net.DialTimeout("tcp4", to.String(), s.Config.Timeout(patience))
		return err
	})
	if err == nil {
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// policed are the flags for a policy of these alone.
func policed(allowed ...string) []string {
	flags := []string{"--no-internet"}
	for _, a := range allowed {
		flags = append(flags, "--allow", a)
	}
	return flags
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
