// Package certificate is the proxy's certificate: the control plane, which has the keys, keeps one in force in a file; the proxy,
// which can read nothing else, follows the file.
package certificate

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/ca"
)

// retryAfter is when what couldn't be read or issued is tried again.
const retryAfter = time.Minute

// Keeper has a certificate in force: the operator's, or one of the own authority's.
type Keeper struct {
	cfg *config.Config
	log *slog.Logger
}

// NewKeeper makes a keeper of the configuration's certificate.
func NewKeeper(cfg *config.Config, log *slog.Logger) *Keeper { return &Keeper{cfg, log} }

// Put puts a certificate in force that is good for now, unless there is one. It should be called again at renew.
func (k *Keeper) Put(ctx context.Context) (renew time.Time, err error) {
	if k.cfg.Proxy.TLSCert != "" {
		return k.putOperators()
	}
	a, err := ca.Open(ctx, k.cfg.CADir(), k.cfg.Proxy.Name())
	if err != nil {
		return time.Time{}, err
	}
	if b, err := os.ReadFile(k.cfg.ProxyCertificate()); err == nil {
		if renew, ok := a.Issued(b); ok && time.Now().Before(renew) {
			return renew, nil
		}
	}
	b, renew, err := a.Issue()
	if err != nil {
		return time.Time{}, err
	}
	return renew, k.write(b)
}

// putOperators takes the operator's certificate as it is now, which stays so until its files change.
func (k *Keeper) putOperators() (time.Time, error) {
	cert, err := os.ReadFile(k.cfg.Proxy.TLSCert)
	if err != nil {
		return time.Time{}, fmt.Errorf("proxy.tls_cert: %w", err)
	}
	key, err := os.ReadFile(k.cfg.Proxy.TLSKey)
	if err != nil {
		return time.Time{}, fmt.Errorf("proxy.tls_key: %w", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return time.Time{}, fmt.Errorf("proxy.tls_cert and proxy.tls_key: %w", err)
	}
	if name := "0-a." + k.cfg.Proxy.Name(); pair.Leaf.VerifyHostname(name) != nil {
		k.log.Warn("the certificate of proxy.tls_cert isn't for sandboxes' names", "needed", "*."+k.cfg.Proxy.Name(), "has", pair.Leaf.DNSNames)
	}
	if left := time.Until(pair.Leaf.NotAfter); left < 0 {
		k.log.Warn("the certificate of proxy.tls_cert has ended", "at", pair.Leaf.NotAfter)
	}
	return time.Time{}, k.write(bytes.Join([][]byte{cert, key}, []byte("\n")))
}

// write puts a certificate in force, all of it at once. The proxy's group may read it, and nobody else.
func (k *Keeper) write(b []byte) (err error) {
	file := k.cfg.ProxyCertificate()
	if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, b) {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if os.Geteuid() == 0 {
		err = f.Chown(0, int(k.cfg.ProxyUID()))
	}
	if err == nil {
		err = f.Chmod(0o640)
	}
	if err == nil {
		_, err = f.Write(b)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

// Run keeps the certificate in force until ctx ends: it renews the authority's in time, and follows the operator's files.
func (k *Keeper) Run(ctx context.Context) error {
	var dirs []string
	if k.cfg.Proxy.TLSCert != "" {
		dirs = []string{filepath.Dir(k.cfg.Proxy.TLSCert), filepath.Dir(k.cfg.Proxy.TLSKey)}
	}
	changes, closeWatch, err := watch(dirs...)
	if err != nil {
		return err
	}
	defer closeWatch()
	for {
		renew, err := k.Put(ctx)
		if err != nil && ctx.Err() == nil {
			k.log.Error("the proxy's certificate can't be renewed", "error", err)
			renew = time.Now().Add(k.cfg.Timeout(retryAfter))
		}
		var due <-chan time.Time
		if !renew.IsZero() {
			due = time.After(time.Until(renew))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-due:
		case <-changes:
		}
	}
}

// watch tells when something changes in directories: files that are replaced are new ones.
func watch(dirs ...string) (<-chan fsnotify.Event, func(), error) {
	if len(dirs) == 0 {
		return nil, func() {}, nil
	}
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, nil, fmt.Errorf("watch the certificate: %w", err)
	}
	for _, d := range dirs {
		if err := w.Add(d); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("watch the certificate: %w", err), w.Close())
		}
	}
	go func() {
		for range w.Errors { // an overflow means changes, which events tell of
		}
	}()
	return w.Events, func() { _ = w.Close() }, nil
}
