package snapshot_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

var shape = vmm.Shape{VCPUs: 1, MemoryMiB: 256}

// host is a host with real machines, whose store is on a file system of the test's own.
type host struct {
	cfg      *config.Config
	launcher *base.Launcher
	store    *snapshot.Store
}

func newHost(t testing.TB, store string) *host {
	t.Helper()
	cfg := testguest.Config(t)
	cfg.StateDir = filepath.Join(store, "state")
	settle := func(ctx context.Context, agent net.Conn) error {
		stop := context.AfterFunc(ctx, func() { agent.Close() })
		defer stop()
		_, err := testguest.Talk(agent).Do(cfg, "ping")
		return err
	}
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	return &host{cfg: cfg, launcher: base.NewLauncher(cfg, settle, log), store: snapshot.New(cfg, log)}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// machine is one with its guest.
type machine struct {
	vmm.Machine
	*testguest.Guest
	disks string
}

// launch makes a machine of the request's kind, which ends with the test.
func (h *host) launch(t testing.TB, r vmm.Request) (*machine, error) {
	t.Helper()
	r.Dir = filepath.Join(h.cfg.VMDir(), r.ID)
	r.DiskDir = filepath.Join(h.cfg.StoreDir(), "boxes", r.ID)
	if err := errors.Join(os.MkdirAll(r.Dir, 0o700), os.MkdirAll(r.DiskDir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if r.Snapshot == "" && r.Shape.VCPUs == 0 {
		r.Shape = shape
	}
	m, err := h.launcher.Launch(within(t, h.cfg.Timeout(3*time.Minute)), r)
	if err != nil {
		if left, _ := filepath.Glob(r.DiskDir + "/*"); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		if _, err := os.Stat(r.Dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left", r.Dir)
		}
		return nil, err
	}
	t.Cleanup(func() {
		if err := stop(m); err != nil {
			t.Errorf("stop %s: %v", r.ID, err)
		}
		if t.Failed() {
			t.Logf("console of %s:\n%s", r.ID, m.Console())
		}
	})
	return &machine{m, testguest.Talk(m.Agent()), r.DiskDir}, nil
}

func (h *host) must(t testing.TB, r vmm.Request) *machine {
	t.Helper()
	m, err := h.launch(t, r)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// fresh is a machine with a root disk that is large and nearly empty.
func (h *host) fresh(t testing.TB, id string) *machine {
	t.Helper()
	return h.must(t, vmm.Request{ID: id, Root: h.image(t, id, 1<<30)})
}

func (h *host) image(t testing.TB, name string, size int64) *os.File {
	t.Helper()
	if err := os.MkdirAll(h.cfg.StoreDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(h.cfg.StoreDir(), name+".img"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func (h *host) save(t testing.TB, id string, m *machine) *snapshot.Info {
	t.Helper()
	info, err := h.store.Save(within(t, h.cfg.Timeout(time.Minute)), id, m.Machine, &rest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func stop(m vmm.Machine) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return m.Stop(ctx)
}

// rest is a guest's agent that does what it is asked, as far as its fields don't say otherwise.
type rest struct {
	freeze, thaw  func(ctx context.Context) error
	frozen, thawn int
}

func (r *rest) Freeze(ctx context.Context) error {
	r.frozen++
	if r.freeze != nil {
		return r.freeze(ctx)
	}
	return nil
}

func (r *rest) Thaw(ctx context.Context) error {
	r.thawn++
	if r.thaw != nil {
		return r.thaw(ctx)
	}
	return nil
}

// witness keeps what the driver says of a save.
type witness struct {
	vmm.Machine
	saved *vmm.Saved
}

func (w *witness) Save(ctx context.Context, r vmm.SaveRequest) (_ *vmm.Saved, err error) {
	w.saved, err = w.Machine.Save(ctx, r)
	return w.saved, err
}
