package config

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Proxy is where sandboxes' ports are reached from outside.
type Proxy struct {
	// Listen is the address and port, for TLS and plain connections alike.
	Listen netip.AddrPort `toml:"listen"`
	// Domain is that below which sandboxes' host names are. A port after it is what clients use, where that isn't Listen's.
	Domain string `toml:"domain"`
	// TLSCert and TLSKey are files with a certificate for *.Domain, its chain, and its key; "" = one of the own authority's.
	TLSCert string `toml:"tls_cert"`
	TLSKey  string `toml:"tls_key"`
}

func defaultProxy() Proxy {
	return Proxy{Listen: netip.MustParseAddrPort("127.0.0.1:3002"), Domain: "sandbox.localhost"}
}

// Names of sandboxes are put before the domain: a label of 63 bytes and a dot.
const maxDomain = 253 - 64

var domainName = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)

func (p *Proxy) validate() error {
	name, port, hasPort := strings.Cut(p.Domain, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case p.Listen.Port() == 0:
		return fmt.Errorf("proxy.listen = %q must be an address with a port, for example 127.0.0.1:3002", p.Listen)
	case len(name) > maxDomain || !domainName.MatchString(name) || hasPort && (err != nil || n == 0):
		return fmt.Errorf("proxy.domain = %q must be a domain name in small letters, with a port after it or none", p.Domain)
	case (p.TLSCert == "") != (p.TLSKey == ""):
		return fmt.Errorf("proxy.tls_cert and proxy.tls_key go together")
	case p.TLSCert != "" && (!filepath.IsAbs(p.TLSCert) || !filepath.IsAbs(p.TLSKey)):
		return fmt.Errorf("proxy.tls_cert and proxy.tls_key must be absolute paths")
	}
	return nil
}

// Name is the domain without a port.
func (p *Proxy) Name() string {
	name, _, _ := strings.Cut(p.Domain, ":")
	return name
}

// Authority is the domain as clients are told of it: with the port, unless that is HTTPS's.
func (p *Proxy) Authority() string {
	name, port, ok := strings.Cut(p.Domain, ":")
	if !ok {
		port = strconv.Itoa(int(p.Listen.Port()))
	}
	if port == "443" {
		return name
	}
	return net.JoinHostPort(name, port)
}

// ProxyUID is the host uid and gid that the proxy runs under: the one before the machines'.
func (c *Config) ProxyUID() uint32 { return c.VM.UIDBase - 1 }

// IngressDir is all that the proxy sees of the file system.
func (c *Config) IngressDir() string { return filepath.Join(c.RunDir, "ingress") }

// RouteSocket is where the control plane tells the proxy of routes.
func (c *Config) RouteSocket() string { return filepath.Join(c.IngressDir(), "route.sock") }

// ProxyCertificate is the certificate in force, with its key.
func (c *Config) ProxyCertificate() string { return filepath.Join(c.IngressDir(), "tls.pem") }

// ProxyDir holds a socket for each proxy there is: one that serves, and those before it that finish what they have begun.
func (c *Config) ProxyDir() string { return filepath.Join(c.RunDir, "proxy") }

// ProxyLog is what the proxy writes; ".1" has what was before.
func (c *Config) ProxyLog() string { return filepath.Join(c.LogDir(), "proxy.log") }

// CADir holds the own certificate authority.
func (c *Config) CADir() string { return filepath.Join(c.StateDir, "ca") }
