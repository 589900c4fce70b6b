package client

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// The suite pulls images whose names on the Internet are compiled into it. It gets ours under these names: its HTTPS
// proxy is a server of this test, which is all registries at once, and its certificates are the one of that server.

// registry is the proxy and what is behind it.
type registry struct {
	images  images
	tunnels chan net.Conn
	done    chan struct{}
}

// serve starts the registry and returns the environment that leads a Go program to it.
func serve(t *testing.T, im images) []string {
	t.Helper()
	certificate, file := selfSigned(t, im.hosts())
	r := &registry{images: im, tunnels: make(chan net.Conn), done: make(chan struct{})}
	tlsServer := &http.Server{Handler: http.HandlerFunc(r.get), ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = tlsServer.Serve(tls.NewListener(r, &tls.Config{Certificates: []tls.Certificate{certificate}}))
	}()
	proxy := httptest.NewServer(http.HandlerFunc(r.connect))
	t.Cleanup(func() {
		proxy.Close()
		_ = tlsServer.Close()
		<-served
	})
	return []string{"HTTPS_PROXY=" + proxy.URL, "https_proxy=", "NO_PROXY=", "no_proxy=", "SSL_CERT_FILE=" + file}
}

// connect is the proxy: whatever host is asked for, the connection goes to the registry.
func (r *registry) connect(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodConnect {
		http.Error(w, "CONNECT only", http.StatusMethodNotAllowed)
		return
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		_ = conn.Close()
		return
	}
	select {
	case r.tunnels <- conn:
	case <-r.done:
		_ = conn.Close()
	}
}

// get is the reading half of the distribution protocol: /v2/NAME/manifests/TAG-OR-DIGEST and /v2/NAME/blobs/DIGEST.
func (r *registry) get(w http.ResponseWriter, req *http.Request) {
	parts := strings.Split(strings.TrimPrefix(req.URL.Path, "/v2/"), "/")
	if n := len(parts); n >= 3 && (parts[n-2] == "manifests" || parts[n-2] == "blobs") {
		dgst := digest.Digest(parts[n-1])
		if d, ok := r.images.refs[req.Host+"/"+strings.Join(parts[:n-2], "/")+":"+parts[n-1]]; ok {
			dgst = d.Digest
		}
		if b, ok := r.images.blobs[dgst]; ok {
			w.Header().Set("Content-Type", b.mediaType)
			w.Header().Set("Docker-Content-Digest", dgst.String())
			http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(b.content))
			return
		}
	}
	http.NotFound(w, req)
}

// Accept, Close and Addr make a net.Listener of the tunnels.
func (r *registry) Accept() (net.Conn, error) {
	select {
	case c := <-r.tunnels:
		return c, nil
	case <-r.done:
		return nil, net.ErrClosed
	}
}

func (r *registry) Close() error {
	close(r.done)
	return nil
}

func (r *registry) Addr() net.Addr { return &net.TCPAddr{} }

// selfSigned makes a certificate for hosts and a file with it that makes it an authority.
func selfSigned(t *testing.T, hosts []string) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: hosts, NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}

// blob is what a digest stands for.
type blob struct {
	mediaType string
	content   []byte
}

// images are what the registry holds, by the whole name (host/repository:tag) and by digest.
type images struct {
	refs  map[string]ocispec.Descriptor
	blobs map[digest.Digest]blob
}

func (im images) hosts() []string {
	var hosts []string
	for ref := range im.refs {
		host, _, _ := strings.Cut(ref, "/")
		hosts = append(hosts, host)
	}
	return hosts
}
