package gateway

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// sysctls is where the namespace's settings are; the kernel shows those of the thread that looks.
const sysctls = "/proc/sys/net"

const (
	ipForward       = "ipv4/ip_forward"
	acceptRedirects = "ipv4/conf/all/accept_redirects"
)

func forwardingOf(dev string) string { return "ipv4/conf/" + dev + "/forwarding" }

func getSysctl(key string) (string, error) {
	b, err := os.ReadFile(filepath.Join(sysctls, key))
	if err != nil {
		return "", fmt.Errorf("read sysctl: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// setSysctl writes only what differs, so that a read-only /proc/sys with the right values is enough.
func setSysctl(key, value string) error {
	if have, err := getSysctl(key); err != nil || have == value {
		return err
	}
	if err := os.WriteFile(filepath.Join(sysctls, key), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl to %s: %w", value, err)
	}
	return nil
}

type setting struct{ key, value string }

// settings of the gateway device and its peer.
func settings(dev string) []setting {
	v4 := "ipv4/conf/" + dev + "/"
	return []setting{
		{v4 + "forwarding", "1"},
		// A source that isn't of the pool doesn't come in, whatever a policy says.
		{v4 + "rp_filter", "1"},
		{v4 + "accept_local", "0"},
		{v4 + "route_localnet", "0"},
		{v4 + "accept_source_route", "0"},
		{v4 + "accept_redirects", "0"},
		{v4 + "send_redirects", "0"},
		{v4 + "proxy_arp", "0"},
		{"ipv6/conf/" + dev + "/disable_ipv6", "1"},
		{"ipv6/conf/" + peerOf(dev) + "/disable_ipv6", "1"},
	}
}

// present leaves out what a kernel without IPv6 doesn't have.
func present(s []setting) (out []setting) {
	_, err := os.Stat(filepath.Join(sysctls, "ipv6"))
	for _, one := range s {
		if !strings.HasPrefix(one.key, "ipv6/") || !errors.Is(err, fs.ErrNotExist) {
			out = append(out, one)
		}
	}
	return out
}
