package traffic

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/health"
)

// published is a port of the host's that leads to a box's.
const published = "18080"

// TestKilled: when a part of a box is killed that talks, is talked to and has a port of the host's, then all of its network is
// free; nothing of it is closed before the box is gone.
func TestKilled(t *testing.T) {
	for _, victim := range []struct {
		name   string
		pid    func(t *testing.T, b *box) int
		signal unix.Signal
		sample bool // in the short form, too
		// repair brings the stack back, where the box goes on.
		repair func(t *testing.T, killed int)
	}{
		{"QEMU", func(t *testing.T, b *box) int { return s.PID(t, b.id) }, unix.SIGKILL, true, nil},
		{"shim", shim, unix.SIGKILL, true, nil},
		{"shim that can say so", shim, unix.SIGTERM, false, nil},
		{"containerd", containerd, unix.SIGKILL, false, awaitContainerd},
		{"daemon", func(*testing.T, *box) int { return up() }, unix.SIGKILL, false, func(t *testing.T, _ int) { cube(t, "up", "-d") }},
	} {
		t.Run(victim.name, func(t *testing.T) {
			if !victim.sample && os.Getenv("CUBE_TEST_LONG") == "" {
				t.Skip("one of many: set CUBE_TEST_LONG=1")
			}
			internet := listenForTalks(t)
			b := newBox(t, "killed", "-p", published+":8080")
			out, in := internet.talkWith(t, b, netip.MustParseAddrPort("169.254.169.254:80"))
			c, err := dial(t, netip.MustParseAddrPort("127.0.0.1:"+published))
			must(t, err)
			talks := []*talk{out, in, speak(t, "through the host's port", c, bufio.NewReader(c))}
			goOn(t, talks...)
			if len(connections(t, b.place.Address)) == 0 {
				t.Error("no connection is in the host's table")
			}
			pid := victim.pid(t, b)
			s.End(t, pid, victim.signal)
			if victim.repair != nil {
				goOn(t, talks[:2]...)
				victim.repair(t, pid)
			}
			cube(t, "rm", "-f", b.id)
			free(t, b, in)
		})
	}
}

// free expects that nothing is left of a box, and that all it had can be had. The host's end of a connection is the host's to
// give up: what it sends meanwhile goes nowhere, and is in the host's table as is all that the host sends.
func free(t *testing.T, b *box, host *talk) {
	t.Helper()
	var left []string
	defer func() {
		if len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}()
	s.Eventually(t, patience, "nothing left", func() bool {
		left = append(s.VMLeaks(), stack.CgroupLeaks(b.id)...)
		return len(left) == 0
	})
	own := fmt.Sprintf("sport=%d ", host.conn.LocalAddr().(*net.TCPAddr).Port)
	for _, c := range connections(t, b.place.Address) {
		if !strings.Contains(c, own) {
			t.Errorf("in the host's table is %s", c)
		}
	}
	if r := s.Cube("network", "flows", b.id); r.Err == nil {
		t.Errorf("it has flows: %s", r.Stdout)
	}
	must(t, s.Host.Do(func() error {
		c, err := net.DialTimeout("tcp4", "127.0.0.1:"+published, time.Second)
		if err == nil {
			_ = c.Close()
			t.Error("its port is open")
		}
		l, err := net.Listen("tcp4", "127.0.0.1:"+published)
		if err != nil {
			return err
		}
		_ = l.Close()
		// A tap of its number is one that is ready, or there is none.
		if _, err := netlink.LinkByName(b.place.Tap); err == nil {
			_, err = os.Stat(filepath.Join(s.Config.NetworkDir(), "free", strings.TrimPrefix(b.place.Tap, s.Config.Network.TapPrefix)))
			return err
		}
		return nil
	}))
}

// shim is the pid of a box's.
func shim(t *testing.T, b *box) int {
	t.Helper()
	for _, p := range s.Processes("containerd-shim-cube-v2") {
		if slices.Contains(strings.Fields(p.Command), b.id) {
			return p.PID
		}
	}
	t.Fatalf("no shim of %s", b.id)
	return 0
}

// containerd is the stack's.
func containerd(t *testing.T, _ *box) int {
	t.Helper()
	found := containerds()
	if len(found) != 1 {
		t.Fatalf("containerds: %v", found)
	}
	return found[0].PID
}

func containerds() []stack.Process {
	return s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
}

// awaitContainerd waits for the next one, which the daemon starts.
func awaitContainerd(t *testing.T, killed int) {
	t.Helper()
	s.Eventually(t, patience, "another containerd", func() bool {
		found := containerds()
		r, _ := health.Query(t.Context(), s.Config.ControlSocket())
		return len(found) == 1 && found[0].PID != killed && r.PID != 0 && len(r.Missing()) == 0
	})
}
