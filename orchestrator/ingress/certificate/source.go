package certificate

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
)

// Source is the certificate in force, for a server.
type Source struct {
	file string
	log  *slog.Logger
	pair atomic.Pointer[tls.Certificate]
}

// NewSource reads the certificate in force.
func NewSource(file string, log *slog.Logger) (*Source, error) {
	s := &Source{file: file, log: log}
	return s, s.read()
}

func (s *Source) read() error {
	b, err := os.ReadFile(s.file)
	if err != nil {
		return fmt.Errorf("read the certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(b, b)
	if err != nil {
		return fmt.Errorf("the certificate %s: %w", s.file, err)
	}
	s.pair.Store(&pair)
	return nil
}

// Follow has the next certificate in force serve, whenever there is one, until ctx ends.
func (s *Source) Follow(ctx context.Context) error {
	changes, closeWatch, err := watch(filepath.Dir(s.file))
	if err != nil {
		return err
	}
	defer closeWatch()
	for {
		if err := s.read(); err != nil {
			s.log.Error("the certificate before stays in force", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
		}
	}
}

// Config is a server's.
func (s *Source) Config() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.pair.Load(), nil },
	}
}
