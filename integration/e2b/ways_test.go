package e2b

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// byHeaders has a command on the stack's host know the stack by two addresses, without TLS.
func byHeaders(_ *testing.T, c *exec.Cmd) *exec.Cmd {
	c.Env = append(os.Environ(), "E2B_API_URL=http://"+s.Config.API.Listen.String(), "E2B_SANDBOX_URL=http://"+s.Config.Proxy.Listen.String())
	return c
}

// byDomain has it know the stack by its domain alone, as a user elsewhere does: with a name server that has a wildcard record, and
// the authority of the proxy's certificate.
func byDomain(t *testing.T, c *exec.Cmd) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	ca, resolv := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "resolv.conf")
	r := s.Cube("ca", "export")
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	proxy := s.Config.Proxy.Listen
	name, _, _ := strings.Cut(s.Config.Proxy.Domain, ":")
	for file, text := range map[string]string{ca: r.Stdout, resolv: "nameserver " + serveNames(t, name, proxy.Addr()) + "\n"} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// The copies of stores' mounts go: others' stacks end meanwhile, whose loop devices they would keep.
	const own = `cat /proc/mounts | while read -r device at rest; do
	case $device:$at in /dev/loop*:*/store) umount -l "$at" || exit ;; esac
done && mount --bind "$0" /etc/resolv.conf && exec "$@"`
	c = exec.Command("unshare", append([]string{"--mount", "sh", "-c", own, resolv}, c.Args...)...)
	_, port, err := net.SplitHostPort(proxy.String())
	if err != nil {
		t.Fatal(err)
	}
	c.Env = append(os.Environ(), "E2B_DOMAIN="+net.JoinHostPort(name, port), "NODE_EXTRA_CA_CERTS="+ca, "SSL_CERT_FILE="+ca)
	return c
}

// serveNames serves a domain's names on the stack's host, all of them with one address, and returns where.
func serveNames(t *testing.T, domain string, all netip.Addr) string {
	t.Helper()
	const at = "127.0.0.53"
	var conn net.PacketConn
	err := s.Host.Do(func() (err error) {
		conn, err = net.ListenPacket("udp4", at+":53")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	server := &dns.Server{PacketConn: conn, NotifyStartedFunc: func() { close(started) }}
	server.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		r := new(dns.Msg).SetReply(q)
		switch asked := q.Question[0]; {
		case !dns.IsSubDomain(dns.Fqdn(domain), asked.Name):
			r.Rcode = dns.RcodeNameError
		case asked.Qtype == dns.TypeA:
			r.Answer = append(r.Answer, &dns.A{Hdr: dns.RR_Header{Name: asked.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: all.AsSlice()})
		}
		_ = w.WriteMsg(r) // who has asked may have gone
	})
	go func() { _ = server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() { _ = server.Shutdown() })
	return at
}
