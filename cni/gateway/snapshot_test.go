package gateway

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// snapshot is everything of the network that Down has to leave as it was.
func snapshot(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, request := range []int{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_GETSET, unix.NFT_MSG_GETRULE} {
		messages, err := dump(unix.NFPROTO_UNSPEC, request)
		must(t, err)
		for _, m := range messages {
			family, _, err := attributes(m)
			must(t, err)
			out = append(out, fmt.Sprintf("nftables %d %d %x", request, family, m.Data[4:]))
		}
	}
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		a := l.Attrs()
		out = append(out, fmt.Sprint("device ", a.Index, a.Name, a.Flags&^net.FlagRunning, a.MTU, a.HardwareAddr, a.Alias))
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	must(t, err)
	for _, a := range addrs {
		out = append(out, fmt.Sprint("address ", a))
	}
	all, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	must(t, err)
	for _, r := range all {
		out = append(out, fmt.Sprint("route ", r))
	}
	list, err := netlink.RuleList(netlink.FAMILY_ALL)
	must(t, err)
	for _, r := range list {
		out = append(out, fmt.Sprint("rule ", r))
	}
	must(t, filepath.WalkDir(sysctls, func(path string, d fs.DirEntry, err error) error {
		// Counts, and what is random.
		if err != nil || d.IsDir() || strings.HasSuffix(path, "_count") || strings.Contains(path, "key") || strings.Contains(path, "stable_secret") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err == nil {
			out = append(out, path+" "+string(b))
		}
		return nil
	}))
	sort.Strings(out)
	return out
}

// same fails the test for each difference.
func same(t *testing.T, before, after []string) {
	t.Helper()
	count := map[string]int{}
	for _, s := range before {
		count[s]++
	}
	for _, s := range after {
		count[s]--
	}
	for s, n := range count {
		switch {
		case n > 0:
			t.Errorf("gone: %s", s)
		case n < 0:
			t.Errorf("left: %s", s)
		}
	}
}
