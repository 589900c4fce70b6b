package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
	orchestrator "github.com/cubesandbox/cube/orchestrator/stack"
)

// reboot leaves of the stack what a host has after a crash: what is on its disks. Nothing of Cube's helps with it.
func reboot(t *testing.T, ids ...string) {
	t.Helper()
	s.Eventually(t, time.Minute, "no processes", func() bool { // those that start meanwhile, too
		left := s.Processes("")
		for _, p := range left {
			if err := unix.Kill(p.PID, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Fatal(err)
			}
		}
		return len(left) == 0
	})
	must(t, orchestrator.UnmountBelow(s.Config.RunDir))
	must(t, os.RemoveAll(s.Config.RunDir))
	// A process that ends has no command line before it has no files.
	s.Eventually(t, time.Minute, "an idle store", func() bool {
		err := orchestrator.UnmountBelow(s.Config.StateDir)
		if err != nil && !errors.Is(err, unix.EBUSY) {
			t.Fatal(err)
		}
		return err == nil
	})
	if entries, err := os.ReadDir(s.Config.StoreDir()); err != nil || len(entries) > 0 {
		t.Fatalf("the store is still there: %v, %v", entries, err)
	}
	must(t, s.Host.Do(dropNetwork))
	for _, id := range ids {
		for _, name := range []string{id, "share-" + id} {
			for _, procs := range stack.CgroupFiles(name, "cgroup.procs") {
				dir := filepath.Dir(procs)
				s.Eventually(t, time.Minute, "the end of "+dir, func() bool {
					err := os.Remove(dir) // processes leave it after they have died
					return err == nil || errors.Is(err, os.ErrNotExist)
				})
			}
		}
	}
}

// dropNetwork takes away all of the stack that the kernel has in the calling thread's network namespace.
func dropNetwork() error {
	n := s.Config.Network
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		if name := l.Attrs().Name; name == n.Device || strings.HasPrefix(name, n.TapPrefix) {
			if err := netlink.LinkDel(l); err != nil {
				return fmt.Errorf("remove %s: %w", name, err)
			}
		}
	}
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.DelTable(&nftables.Table{Name: n.NFTable, Family: nftables.TableFamilyINet})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("remove table %s: %w", n.NFTable, err)
	}
	rules, err := netlink.RuleList(netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if r.Priority == n.RulePriority {
			if err := netlink.RuleDel(&r); err != nil {
				return fmt.Errorf("remove rule %v: %w", r, err)
			}
		}
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: n.RouteTable}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if err := netlink.RouteDel(&r); err != nil {
			return fmt.Errorf("remove route %v: %w", r, err)
		}
	}
	return testhost.Sysctl("ipv4/ip_forward", "0")
}

// reaches sees that a container reaches the internet, by name.
func reaches(t *testing.T, id string) {
	t.Helper()
	got := cube(t, "exec", id, "timeout", "60", "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/server.test/%d && echo who >&3 && head -n 1 <&3", testhost.DataPort))
	if got != testhost.Uplink.String() {
		t.Errorf("%s is seen as %q", id, got)
	}
}

// disks are those of machines that were made from snapshots.
func disks(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(s.Config.DiskDir())
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestReboot: what is paused goes on after the host has crashed. What ran is stopped, and its machine's disks don't stay.
func TestReboot(t *testing.T) {
	store(t)
	kept, ran := s.ID(t, "kept"), s.ID(t, "ran")
	cube(t, "run", "-d", "--name", kept, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { s.Cube("rm", "-f", kept) }) // unless the test has come to that
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, kept) > 0 })
	reaches(t, kept)
	before := lasts(t, kept)
	cube(t, "pause", kept)
	cube(t, "run", "-d", "--name", ran, stack.Image, "sh", "-c", ticker)
	t.Cleanup(func() { s.Cube("rm", "-f", ran) })
	goesOn(t, ran)
	cube(t, "pause", ran)
	cube(t, "resume", ran)
	goesOn(t, ran)
	if have := disks(t); len(have) != 1 || !strings.HasPrefix(have[0], ran+"-") {
		t.Fatalf("disks: %v", have)
	}

	reboot(t, kept, ran)
	began := time.Now()
	cube(t, "up", "-d")
	t.Logf("up after %v", time.Since(began).Round(time.Millisecond))
	status := map[string]string{}
	for line := range strings.Lines(cube(t, "ps", "-a")) {
		for _, id := range []string{kept, ran} {
			if strings.Contains(line, id) {
				status[id] = line
			}
		}
	}
	if !strings.Contains(status[kept], "paused") || !strings.Contains(status[ran], "not running") {
		t.Errorf("cube ps -a: %q", status)
	}
	// Nobody is told of what the daemon does beside its work.
	s.Eventually(t, time.Minute, "no disks of "+ran, func() bool { return len(disks(t)) == 0 })

	resumes(t, kept)
	after := lasts(t, kept)
	if after < before {
		t.Errorf("%d before, %d after", before, after)
	}
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, kept) > after })
	connected(t, kept)
	reaches(t, kept)

	cube(t, "rm", ran)
	cube(t, "rm", "-f", kept)
	if got := cube(t, "ps", "-aq"); got != "" {
		t.Errorf("containers are left: %s", got)
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("snapshots are left: %s", left)
	}
	if left, _ := os.ReadDir(filepath.Join(s.Config.PausedDir(), s.Config.Containerd.Namespace)); len(left) > 0 {
		t.Errorf("paused: %v", left)
	}
	if left := append(s.VMLeaks(), stack.CgroupLeaks(kept, ran)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
