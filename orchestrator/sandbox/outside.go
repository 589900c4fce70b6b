package sandbox

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteconfig "github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
)

// special are addresses that are nobody's on the Internet, or that lead to others (IANA's registries of special-purpose addresses).
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("240.0.0.0/4"), // this network, and reserved
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("192.0.0.0/24"), // of carriers, of benchmarks, of protocols
	netip.MustParsePrefix("::/96"), netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("64:ff9b:1::/48"), // have one of IPv4 in them
	netip.MustParsePrefix("2002::/16"), netip.MustParsePrefix("2001::/32"), netip.MustParsePrefix("fec0::/10"), // 6to4, Teredo, sites
}

// public tells whether an address may be anybody's, not the host's own, whose interfaces have these, or a network's of its.
func public(a netip.Addr, own []net.Addr) bool {
	a = a.Unmap()
	return a.IsGlobalUnicast() && !a.IsPrivate() && !slices.ContainsFunc(special, func(p netip.Prefix) bool { return p.Contains(a) }) && !slices.ContainsFunc(own, func(of net.Addr) bool {
		p, err := netip.ParsePrefix(of.String())
		return err == nil && p.Addr().Unmap() == a.WithZone("")
	})
}

// described tells whether the host's containerd configuration is about that very registry.
func described(registry string) bool {
	dir, err := remoteconfig.HostDirFromRoot(registryConfig)(registry)
	return err == nil && filepath.Base(dir) != "_default"
}

// outside has a client of a registry, who names it, reach nothing of the host and its networks by that name, nor by where it leads.
// The proxies that the environment names are reached, and what is the host's own choice, HOST:PORT.
func outside(c *http.Client, own map[string]bool) error {
	t, ok := c.Transport.(*http.Transport)
	if !ok {
		return fmt.Errorf("a registry's transport is a %T", c.Transport)
	}
	t = t.Clone()
	dial, proxies := t.DialContext, proxies(os.Getenv)
	guarded := &net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		own, err := net.InterfaceAddrs()
		if err != nil {
			return fmt.Errorf("look for the host's own addresses: %w", err)
		}
		at, err := netip.ParseAddrPort(address)
		if err != nil || !public(at.Addr(), own) {
			return errdefs.ErrPermissionDenied.WithMessage(fmt.Sprintf(
				"%s is of this host or a private network: describe the registry in %s, or `cube image pull` the image first", address, registryConfig))
		}
		return nil
	}}
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if proxies[address] || own[address] {
			return dial(ctx, network, address)
		}
		return guarded.DialContext(ctx, network, address)
	}
	c.Transport = t
	return nil
}

// proxies are those of the environment, HOST:PORT.
func proxies(getenv func(string) string) map[string]bool {
	all := map[string]bool{}
	for _, name := range []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"} {
		text := getenv(name)
		u, err := url.Parse(text)
		if err != nil || u.Host == "" {
			u, err = url.Parse("http://" + text)
		}
		if err != nil || u.Hostname() == "" {
			continue
		}
		all[withPort(u)] = true
	}
	return all
}

// withPort is a URL's HOST:PORT.
func withPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme]
	}
	if port == "" {
		port = "80"
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// mirrors are those of the hosts, HOST:PORT, that aren't the registry's: the host's configuration has them for any.
func mirrors(hosts []docker.RegistryHost, registry string) (map[string]bool, error) {
	own, err := docker.DefaultHost(registry)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, h := range hosts {
		if h.Host != own && h.Host != registry {
			all[withPort(&url.URL{Scheme: h.Scheme, Host: h.Host})] = true
		}
	}
	return all, nil
}

// Hosts are where an image, or whatever else has such a name, is asked for.
func (o PullOptions) Hosts(ctx context.Context, name string) docker.RegistryHosts {
	h := remoteconfig.HostOptions{HostDir: remoteconfig.HostDirFromRoot(registryConfig), Credentials: o.credentials(name)}
	if !o.Outside || described(registryOf(name)) {
		return remoteconfig.ConfigureHosts(ctx, h)
	}
	return func(registry string) ([]docker.RegistryHost, error) {
		all, err := remoteconfig.ConfigureHosts(ctx, h)(registry)
		if err != nil {
			return nil, err
		}
		own, err := mirrors(all, registry)
		if err != nil {
			return nil, err
		}
		guarded := h
		guarded.UpdateClient = func(c *http.Client) error { return outside(c, own) }
		return remoteconfig.ConfigureHosts(ctx, guarded)(registry)
	}
}
