package certificate

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/ca"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func newConfig(t *testing.T) *config.Config {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = t.TempDir(), t.TempDir()
	if err := os.MkdirAll(cfg.IngressDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	return cfg
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOwnAuthority(t *testing.T) {
	cfg := newConfig(t)
	k := NewKeeper(cfg, quiet)
	renew, err := k.Put(t.Context())
	if err != nil || time.Until(renew) < 24*time.Hour {
		t.Fatal(renew, err)
	}
	first := read(t, cfg.ProxyCertificate())
	if st, err := os.Stat(cfg.ProxyCertificate()); err != nil || st.Mode() != 0o640 {
		t.Error(st.Mode(), err)
	}
	if again, err := k.Put(t.Context()); err != nil || !again.Equal(renew.Truncate(time.Second)) || !bytes.Equal(first, read(t, cfg.ProxyCertificate())) {
		t.Error("a certificate that is good is replaced: ", again, renew, err)
	}
	// What isn't the authority's, or isn't whole, is replaced.
	for _, other := range [][]byte{nil, []byte("x"), first[:len(first)/2]} {
		if err := os.WriteFile(cfg.ProxyCertificate(), other, 0o640); err != nil {
			t.Fatal(err)
		}
		if _, err := k.Put(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := NewSource(cfg.ProxyCertificate(), quiet); err != nil {
			t.Error(err)
		}
	}
}

// TestOperators has the operator's certificate renewed while it is served.
func TestOperators(t *testing.T) {
	cfg := newConfig(t)
	authority, err := ca.Open(t.Context(), t.TempDir(), cfg.Proxy.Name())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cfg.Proxy.TLSCert, cfg.Proxy.TLSKey = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	put := func() {
		t.Helper()
		b, _, err := authority.Issue()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range []string{cfg.Proxy.TLSCert, cfg.Proxy.TLSKey} { // each has both, and is taken for its own
			if err := os.WriteFile(f+".new", b, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(f+".new", f); err != nil {
				t.Fatal(err)
			}
		}
	}
	k := NewKeeper(cfg, quiet)
	if _, err := k.Put(t.Context()); err == nil {
		t.Error("a certificate that isn't there is put in force")
	}
	put()
	if _, err := k.Put(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- k.Run(ctx) }()
	s, err := NewSource(cfg.ProxyCertificate(), quiet)
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- s.Follow(ctx) }()
	serving := func() []byte {
		pair, err := s.Config().GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return pair.Certificate[0]
	}
	for range 3 {
		before := serving()
		put()
		for end := time.Now().Add(10 * time.Second); bytes.Equal(serving(), before); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the certificate that has been replaced is still served")
			}
		}
	}
	// What is broken isn't put in force.
	before := serving()
	if err := os.WriteFile(cfg.Proxy.TLSCert, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Put(t.Context()); err == nil || !bytes.Equal(before, serving()) {
		t.Error("a broken certificate is served", err)
	}
	cancel()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}
