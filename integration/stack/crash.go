package stack

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

	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/config"
	orchestrator "github.com/cubesandbox/cube/orchestrator/stack"
)

// Crash leaves of the stack what a host has that has crashed and was started again: what is on its disks. Nothing of Cube's helps
// with it. ids are the containers that have cgroups.
func (s *Stack) Crash(t testing.TB, ids ...string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	s.Eventually(t, time.Minute, "no processes", func() bool { // those that start meanwhile, too
		left := s.Processes("")
		for _, p := range left {
			if err := unix.Kill(p.PID, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Fatal(err)
			}
		}
		return len(left) == 0
	})
	must(orchestrator.UnmountBelow(s.Config.RunDir))
	must(os.RemoveAll(s.Config.RunDir))
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
	must(s.Host.Do(func() error { return dropNetwork(s.Config.Network) }))
	for _, id := range ids {
		for _, name := range []string{id, "share-" + id} {
			for _, procs := range CgroupFiles(name, "cgroup.procs") {
				dir := filepath.Dir(procs)
				s.Eventually(t, time.Minute, "the end of "+dir, func() bool {
					err := os.Remove(dir) // processes leave it after they have died
					return err == nil || errors.Is(err, os.ErrNotExist)
				})
			}
		}
	}
}

// dropNetwork takes away all of a stack's that the kernel has in the calling thread's network namespace.
func dropNetwork(n config.Network) error {
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
