package ca

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

const domain = "sandbox.localhost"

func open(t *testing.T, dir string) *Authority {
	t.Helper()
	a, err := Open(t.Context(), dir, domain)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func pool(a *Authority) *x509.CertPool {
	p := x509.NewCertPool()
	p.AppendCertsFromPEM(a.Root())
	return p
}

func TestOpen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	var wg sync.WaitGroup
	roots := make([][]byte, 8)
	for i := range roots {
		wg.Go(func() { roots[i] = open(t, dir).Root() })
	}
	wg.Wait()
	for _, r := range roots {
		if !bytes.Equal(r, roots[0]) {
			t.Fatal("there are two authorities")
		}
	}
	file := filepath.Join(dir, domain+".pem")
	for path, mode := range map[string]os.FileMode{dir: 0o700 | os.ModeDir, file: 0o600} {
		if st, err := os.Stat(path); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	for _, broken := range [][]byte{nil, []byte("x"), open(t, dir).Root()} {
		if err := os.WriteFile(file, broken, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), dir, domain); err == nil {
			t.Errorf("%q is taken for an authority", broken)
		}
		os.Remove(file)
	}
}

func TestIssue(t *testing.T) {
	a := open(t, t.TempDir())
	b, renew, err := a.Issue()
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(b, b)
	if err != nil {
		t.Fatal(err)
	}
	if left := pair.Leaf.NotAfter.Sub(renew); left.Round(time.Minute) != renewBefore || renew.Before(time.Now()) {
		t.Errorf("renewed at %v, ends at %v", renew, pair.Leaf.NotAfter)
	}
	for name, ok := range map[string]bool{domain: true, "49983-i1." + domain: true, "a.b." + domain: false, "localhost": false, "example.com": false} {
		_, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool(a), DNSName: name})
		if (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestConstraints signs with the authority's key what it must not be good for.
func TestConstraints(t *testing.T) {
	a := open(t, t.TempDir())
	for name, template := range map[string]*x509.Certificate{
		"another domain":   {DNSNames: []string{"example.com"}},
		"one that ends so": {DNSNames: []string{"evil" + domain}},
		"an address":       {IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}},
		"an IPv6 address":  {IPAddresses: []net.IP{net.IPv6loopback}},
		"a client":         {DNSNames: []string{domain}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
	} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
		der, err := sign(template, a.cert, key, a.key)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool(a), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil && name != "a client" {
			t.Errorf("%s: it is trusted", name)
		}
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool(a), KeyUsages: template.ExtKeyUsage}); err == nil {
			t.Errorf("%s: it is trusted", name)
		}
	}
}

// TestOpenSSL has another implementation agree, which is that of Node.js and Python.
func TestOpenSSL(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("there is no openssl")
	}
	dir := t.TempDir()
	a := open(t, dir)
	b, _, err := a.Issue()
	if err != nil {
		t.Fatal(err)
	}
	root, leaf := filepath.Join(dir, "root.pem"), filepath.Join(dir, "leaf.pem")
	if err := os.WriteFile(root, a.Root(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(leaf, b, 0o600); err != nil {
		t.Fatal(err)
	}
	verify := []string{"verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", root, "-verify_hostname"}
	if out, err := exec.Command(openssl, append(verify, "3000-i1."+domain, leaf)...).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := exec.Command(openssl, append(verify, "example.com", leaf)...).CombinedOutput(); err == nil {
		t.Errorf("it is taken for example.com's: %s", out)
	}
}
