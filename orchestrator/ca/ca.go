// Package ca is this installation's own certificate authority, for the one domain below which sandboxes are. It knows nothing of
// who uses its certificates.
package ca

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/cubesandbox/cube/internal/flock"
)

const (
	rootLife = 10 * 365 * 24 * time.Hour
	leafLife = 90 * 24 * time.Hour
	// renewBefore is how long before its end a certificate is replaced.
	renewBefore = leafLife / 3
	// skew is how much clients' clocks may be behind.
	skew = time.Hour
)

const (
	blockCert = "CERTIFICATE"
	blockKey  = "PRIVATE KEY"
)

// Authority can issue certificates for its domain, and by its own certificate for nothing else.
type Authority struct {
	domain string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
}

// Open reads the authority of a domain from dir, or makes it: whoever trusts it once goes on trusting it. dir is made if need be,
// for root alone.
func Open(ctx context.Context, dir, domain string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the certificate authority's directory: %w", err)
	}
	unlock, err := flock.LockDir(ctx, dir, false)
	if err != nil {
		return nil, fmt.Errorf("lock the certificate authority: %w", err)
	}
	defer unlock()
	file := filepath.Join(dir, domain+".pem")
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return create(file, domain)
	}
	if err != nil {
		return nil, fmt.Errorf("read the certificate authority: %w", err)
	}
	a, err := parse(b, domain)
	if err != nil {
		return nil, fmt.Errorf("%s can't be used: %w; remove it to have another one made, which clients have to be told of", file, err)
	}
	return a, nil
}

// create makes an authority and keeps it: all of it or nothing.
func create(file, domain string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "Cube sandboxes of " + host, Organization: []string{"Cube"}},
		NotBefore:             now.Add(-skew),
		NotAfter:              now.Add(rootLife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		// Who trusts it risks no other name, should its key get lost. A kind of name without a constraint would be free.
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         []string{domain},
		ExcludedIPRanges:            []*net.IPNet{everything(net.IPv4len), everything(net.IPv6len)},
	}
	der, err := sign(template, template, key, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	a := &Authority{domain: domain, cert: cert, key: key}
	b, err := encode([][]byte{der}, key)
	if err != nil {
		return nil, err
	}
	if err := keep(file, b); err != nil {
		return nil, fmt.Errorf("keep the certificate authority: %w", err)
	}
	return a, nil
}

// everything is all addresses of a length in bytes.
func everything(length int) *net.IPNet {
	return &net.IPNet{IP: make(net.IP, length), Mask: make(net.IPMask, length)}
}

func sign(template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial.Add(serial, big.NewInt(1)) // 0 is none
	return x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
}

// encode writes certificates and a key, as a server reads them.
func encode(certs [][]byte, key *ecdsa.PrivateKey) ([]byte, error) {
	var out []byte
	for _, der := range certs {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: blockCert, Bytes: der})...)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return append(out, pem.EncodeToMemory(&pem.Block{Type: blockKey, Bytes: der})...), nil
}

func parse(b []byte, domain string) (*Authority, error) {
	a := &Authority{domain: domain}
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		switch block.Type {
		case blockCert:
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, err
			}
			a.cert = cert
		case blockKey:
			key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
			if err != nil {
				return nil, err
			}
			a.key, _ = key.(*ecdsa.PrivateKey)
		}
	}
	switch {
	case a.cert == nil || a.key == nil:
		return nil, errors.New("it has no certificate or no key")
	case !a.cert.IsCA || !a.key.PublicKey.Equal(a.cert.PublicKey):
		return nil, errors.New("its key is another certificate's")
	case time.Now().After(a.cert.NotAfter):
		return nil, fmt.Errorf("it has ended at %s", a.cert.NotAfter.Format(time.RFC3339))
	}
	return a, nil
}

// Root is the authority's certificate, for those who are to trust it.
func (a *Authority) Root() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: blockCert, Bytes: a.cert.Raw})
}

// Issue makes a certificate for the domain and all names right below it, with its key. It should be replaced at renew.
func (a *Authority) Issue() (certAndKey []byte, renew time.Time, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, time.Time{}, err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: a.domain},
		NotBefore:   now.Add(-skew),
		NotAfter:    now.Add(leafLife),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{a.domain, "*." + a.domain},
	}
	if template.NotAfter.After(a.cert.NotAfter) {
		template.NotAfter = a.cert.NotAfter
	}
	der, err := sign(template, a.cert, key, a.key)
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("issue a certificate: %w", err)
	}
	certAndKey, err = encode([][]byte{der}, key)
	return certAndKey, template.NotAfter.Add(-renewBefore), err
}

// Issued says whether a certificate with its key is one that Issue has made, and when it should be replaced.
func (a *Authority) Issued(certAndKey []byte) (renew time.Time, ok bool) {
	pair, err := tls.X509KeyPair(certAndKey, certAndKey)
	if err != nil || pair.Leaf.CheckSignatureFrom(a.cert) != nil || pair.Leaf.VerifyHostname("a."+a.domain) != nil {
		return time.Time{}, false
	}
	return pair.Leaf.NotAfter.Add(-renewBefore), true
}

// keep writes a file that has all of b or isn't there, for its owner alone.
func keep(file string, b []byte) error {
	tmp := file + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, file); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
