// Package netstate tells tests what a host's network is made of, an item a line, so that they see what was left of it or
// taken. What comes and goes by itself isn't in it.
package netstate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Take lists the state of the calling thread's network namespace. The settings of devices are those of the named ones, and of
// lo; others come and go with theirs.
func Take(devices ...string) (all []string, err error) {
	for _, list := range []func() ([]string, error){
		links, addresses, routes, rules, tables,
		func() ([]string, error) { return sysctls(append([]string{"all", "default", "lo"}, devices...)) },
	} {
		some, err := list()
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// Diff says what of it has gone, and what has come.
func Diff(before, after []string) (diff []string) {
	count := map[string]int{}
	for _, s := range before {
		count[s]--
	}
	for _, s := range after {
		count[s]++
	}
	for s, n := range count {
		switch {
		case n > 0:
			diff = append(diff, "left: "+s)
		case n < 0:
			diff = append(diff, "gone: "+s)
		}
	}
	slices.Sort(diff)
	return diff
}

func links() ([]string, error) {
	list, err := netlink.LinkList()
	return describe(list, err, func(l netlink.Link) string { return "device " + l.Attrs().Name })
}

func addresses() ([]string, error) {
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	return describe(list, err, func(a netlink.Addr) string { return "address " + a.IPNet.String() })
}

func routes() ([]string, error) {
	list, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	return describe(list, err, func(r netlink.Route) string { return "route " + r.String() })
}

func rules() ([]string, error) {
	list, err := netlink.RuleList(netlink.FAMILY_ALL)
	return describe(list, err, func(r netlink.Rule) string { return fmt.Sprint("rule ", r.Priority) })
}

func tables() ([]string, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	list, err := c.ListTables()
	return describe(list, err, func(t *nftables.Table) string { return "nftables table " + t.Name })
}

// describe is for the lists that the kernel gives.
func describe[T any](list []T, err error, name func(T) string) (all []string, _ error) {
	if err != nil {
		return nil, fmt.Errorf("list the network's state: %w", err)
	}
	for _, item := range list {
		all = append(all, name(item))
	}
	return all, nil
}

// sysctls are the settings, but for counts and what is random.
func sysctls(devices []string) (all []string, _ error) {
	err := filepath.WalkDir("/proc/sys/net", func(path string, d fs.DirEntry, err error) error {
		if parent := filepath.Base(filepath.Dir(path)); err == nil && d.IsDir() && (parent == "conf" || parent == "neigh") && !slices.Contains(devices, d.Name()) {
			return fs.SkipDir
		}
		if err != nil || d.IsDir() || strings.HasSuffix(path, "_count") || strings.Contains(path, "key") || strings.Contains(path, "stable_secret") {
			return nil
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EIO) || errors.Is(err, unix.EOPNOTSUPP) {
			return nil // not everything can be read
		} else if err != nil {
			return err
		}
		all = append(all, path+" "+strings.TrimSpace(string(b)))
		return nil
	})
	return all, err
}
