package e2b

import (
	"archive/tar"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// registry is one on the test's internet, that has one image by any name, and may stop amid its last layer.
type registry struct {
	files    map[string][]byte // of the image's archive
	manifest ocispec.Descriptor
	last     string // where the layer is

	mu    sync.Mutex
	gate  chan struct{} // the layer's second half comes when it is closed
	halfs chan struct{} // told when half of it has been sent
}

// newRegistry serves the image of an archive, and has cube trust it from its next start on, until the test ends.
func newRegistry(t *testing.T, archive string) *registry {
	t.Helper()
	r := &registry{files: map[string][]byte{}, halfs: make(chan struct{}, 16)}
	err := stack.EachFile(archive, func(h *tar.Header, in io.Reader) error {
		b, err := io.ReadAll(in)
		r.files[h.Name] = b
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var index ocispec.Index
	var manifest ocispec.Manifest
	if err := json.Unmarshal(r.files["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	r.manifest = index.Manifests[0]
	if err := json.Unmarshal(r.files[blob(r.manifest.Digest.Encoded())], &manifest); err != nil {
		t.Fatal(err)
	}
	r.last = blob(manifest.Layers[len(manifest.Layers)-1].Digest.Encoded())
	certificate, file := selfSigned(t)
	t.Setenv("SSL_CERT_FILE", file)
	l, err := s.Host.Internet.Listen("tcp", net.JoinHostPort(testhost.Server.String(), "443"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}}))
	}()
	t.Cleanup(func() {
		r.opens()
		_ = server.Close()
		<-served
	})
	return r
}

func blob(hex string) string { return path.Join("blobs/sha256", hex) }

// stops has the last layer stop amid it, until it opens.
func (r *registry) stops() {
	for len(r.halfs) > 0 {
		<-r.halfs
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gate = make(chan struct{})
}

func (r *registry) opens() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gate != nil {
		close(r.gate)
		r.gate = nil
	}
}

// ServeHTTP is the reading half of the distribution protocol.
func (r *registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	dir, name := path.Split(strings.TrimSuffix(req.URL.Path, "/"))
	if !strings.HasPrefix(req.URL.Path, "/v2/") {
		http.NotFound(w, req)
		return
	}
	at, kind := blob(strings.TrimPrefix(name, "sha256:")), "application/octet-stream"
	switch path.Base(dir) {
	case "manifests":
		at, kind = blob(r.manifest.Digest.Encoded()), r.manifest.MediaType
		w.Header().Set("Docker-Content-Digest", r.manifest.Digest.String())
	case "blobs":
	default: // is it one at all
		return
	}
	content, ok := r.files[at]
	if !ok {
		http.NotFound(w, req)
		return
	}
	w.Header().Set("Content-Type", kind)
	r.mu.Lock()
	gate := r.gate
	r.mu.Unlock()
	if at != r.last || req.Method != http.MethodGet || gate == nil {
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(content))
		return
	}
	half := len(content) / 2
	_, err := w.Write(content[:half])
	if f, ok := w.(http.Flusher); ok && err == nil {
		f.Flush()
	}
	select {
	case r.halfs <- struct{}{}:
	default:
	}
	select {
	case <-gate:
		_, _ = w.Write(content[half:])
	case <-req.Context().Done():
	}
}

// selfSigned makes the certificate of the test's internet, and a file with it by which it is trusted.
func selfSigned(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{testhost.Server.AsSlice()}, NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "internet.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}
