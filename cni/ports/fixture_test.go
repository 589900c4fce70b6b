package ports_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/ports"
	"github.com/cubesandbox/cube/internal/testnet"
)

// fixture is a server whose sandboxes are at addresses of the loopback device.
type fixture struct {
	*ports.Server
	t     *testing.T
	dir   string
	ended chan error

	mu  sync.Mutex
	has map[string]target
}

type target struct {
	address string
	ports   []ports.Port
}

// serve runs a server until the test ends. Its timeouts are divided by hurry.
func serve(t *testing.T, hurry time.Duration) *fixture { return serveBy(t, "lo", hurry) }

// serveBy is for sandboxes that should be reached by a device.
func serveBy(t *testing.T, device string, hurry time.Duration) *fixture {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: binding a socket to a device takes root")
	}
	f := &fixture{t: t, dir: filepath.Join(t.TempDir(), "ports"), ended: make(chan error, 1), has: map[string]target{}}
	testnet.Must(t, os.Mkdir(f.dir, 0o700))
	f.Server = ports.New(ports.Config{
		Lookup: f.lookup, IDs: f.ids, Dir: f.dir, Device: device,
		Timeout: func(d time.Duration) time.Duration { return d / hurry },
		Log:     slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.Background())
	go func() { f.ended <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-f.ended:
		case <-time.After(wait):
			t.Error("Run doesn't end")
		}
	})
	return f
}

func (f *fixture) ids() ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.has)), nil
}

func (f *fixture) lookup(id string) (*ports.Target, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	has, ok := f.has[id]
	if !ok {
		return nil, errdefs.ErrNotFound
	}
	t := &ports.Target{Address: netip.MustParseAddr(has.address)}
	for _, p := range has.ports {
		file, err := os.Open(f.file(p))
		if err != nil {
			return nil, err
		}
		t.Leases = append(t.Leases, ports.Lease{Port: p, File: file})
	}
	return t, nil
}

func (f *fixture) file(p ports.Port) string {
	return filepath.Join(f.dir, fmt.Sprintf("%s-%d", p.Protocol, p.HostPort))
}

// give has a sandbox have ports, and tells the server.
func (f *fixture) give(id, address string, all ...ports.Port) error {
	f.mu.Lock()
	for _, p := range all {
		testnet.Must(f.t, os.WriteFile(f.file(p), nil, 0o600))
	}
	f.has[id] = target{address, all}
	f.mu.Unlock()
	return f.update(id)
}

// take has it have them no more, and doesn't tell.
func (f *fixture) take(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.has[id].ports {
		testnet.Must(f.t, os.Remove(f.file(p)))
	}
	delete(f.has, id)
}

func (f *fixture) update(id string) error {
	w := httptest.NewRecorder()
	f.ServeHTTP(w, httptest.NewRequest("POST", ports.Path+"?"+url.Values{"id": {id}}.Encode(), nil))
	if w.Code != 200 {
		return errors.New(w.Body.String())
	}
	return nil
}

// listen has a sandbox answer connections at an address until close.
func listen(t *testing.T, at string, answer func(*net.TCPConn)) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", at)
	testnet.Must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(wait))
				answer(c.(*net.TCPConn))
			}()
		}
	}()
	return l
}

// readAll connects, and reads so many bytes or all. A reset may come before the connection is known to be there.
func readAll(at string, most int64) error {
	c, err := net.Dial("tcp4", at)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(wait))
	_, err = io.Copy(io.Discard, io.LimitReader(c, most))
	return err
}

// until waits for what happens by itself.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(wait); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so after %v: %s", wait, what)
		}
	}
}

func isFree(at string) bool {
	l, err := net.Listen("tcp4", at)
	if err == nil {
		l.Close()
	}
	return err == nil
}
