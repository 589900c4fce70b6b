package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/undo"
)

const (
	// registryName is what builds call the registry, which is reached by a proxy, as what they name mustn't be of this host.
	registryName = "registry.example"
	// plainRegistry and proxy are where it is on the stack's host, for who pushes and for who pulls.
	plainRegistry, proxy = "127.0.0.1:5000", "127.0.0.1:3128"
)

// trust has stacks that are started then use the proxy and believe in the certificate that is returned.
func trust(u *undo.Stack) (tls.Certificate, error) {
	dir, err := os.MkdirTemp("", "cube-bench-")
	if err != nil {
		return tls.Certificate{}, err
	}
	u.Push(func() error { return os.RemoveAll(dir) })
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{registryName}, NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	file := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		return tls.Certificate{}, err
	}
	for k, v := range map[string]string{"HTTPS_PROXY": "http://" + proxy, "https_proxy": "", "NO_PROXY": "", "no_proxy": "", "SSL_CERT_FILE": file} {
		was, there := os.LookupEnv(k)
		if err := os.Setenv(k, v); err != nil {
			return tls.Certificate{}, err
		}
		u.Push(func() error {
			if there {
				return os.Setenv(k, was)
			}
			return os.Unsetenv(k)
		})
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// serveRegistry serves an empty registry on a stack's host: in plain text to who pushes, and by TLS behind a proxy.
func serveRegistry(s *stack.Stack, cert tls.Certificate, u *undo.Stack) error {
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	plain, err := s.Host.Listen("tcp4", plainRegistry)
	if err != nil {
		return err
	}
	outside, err := s.Host.Listen("tcp4", proxy)
	if err != nil {
		return errors.Join(err, plain.Close())
	}
	t := &tunnels{conns: make(chan net.Conn), closed: make(chan struct{})}
	for _, srv := range []struct {
		l net.Listener
		h http.Handler
	}{{plain, images}, {outside, t}, {tls.NewListener(t, &tls.Config{Certificates: []tls.Certificate{cert}}), images}} {
		server := &http.Server{Handler: srv.h, ReadHeaderTimeout: time.Minute}
		ended := make(chan error, 1)
		go func() { ended <- server.Serve(srv.l) }()
		u.Push(func() error {
			err := server.Close()
			if e := <-ended; !errors.Is(e, http.ErrServerClosed) {
				err = errors.Join(err, e)
			}
			return err
		})
	}
	return nil
}

// tunnels is a proxy, which leads to itself whoever asks for whatever host: a net.Listener of those connections.
type tunnels struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (t *tunnels) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodConnect {
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
	case t.conns <- conn:
	case <-t.closed:
		_ = conn.Close()
	}
}

// Accept is of net.Listener.
func (t *tunnels) Accept() (net.Conn, error) {
	select {
	case c := <-t.conns:
		return c, nil
	case <-t.closed:
		return nil, net.ErrClosed
	}
}

// Close is of net.Listener. It is called once.
func (t *tunnels) Close() error {
	close(t.closed)
	return nil
}

// Addr is of net.Listener.
func (t *tunnels) Addr() net.Addr { return &net.TCPAddr{} }
