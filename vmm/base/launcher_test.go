package base_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
)

func TestMain(m *testing.M) { testfs.Main(m, testguest.Remove) }

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// settle is what the agent's user does with the real agent.
func settle(cfg *config.Config) base.Settle {
	return func(ctx context.Context, agent net.Conn) error {
		stop := context.AfterFunc(ctx, func() { agent.Close() })
		defer stop()
		_, err := testguest.Talk(agent).Do(cfg, "ping")
		return err
	}
}

func launch(t testing.TB, cfg *config.Config, l *base.Launcher, id string, shape vmm.Shape) (vmm.Machine, *testguest.Guest) {
	t.Helper()
	dir := filepath.Join(cfg.VMDir(), id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	m, err := l.Launch(within(t, cfg.Timeout(3*time.Minute)), vmm.Request{ID: id, Dir: dir, Shape: shape})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(m); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			t.Logf("console:\n%s", m.Console())
		}
	})
	g := testguest.Talk(m.Agent())
	launched := time.Since(start)
	g.Must(t, cfg, "ping")
	t.Logf("%s: launched in %s, first answer after %s", id, launched, time.Since(start))
	return m, g
}

// TestLaunch is the life of a base snapshot with real machines: made once, restored ever after, made again when it is
// damaged.
func TestLaunch(t *testing.T) {
	cfg := testguest.Config(t)
	var settled atomic.Int32
	l := base.NewLauncher(cfg, func(ctx context.Context, agent net.Conn) error {
		settled.Add(1)
		if err := settle(cfg)(ctx, agent); err != nil {
			return err
		}
		return agent.Close() // must not reach the guest
	}, slog.Default())
	shape := vmm.Shape{VCPUs: 1, MemoryMiB: 200}
	first, g := launch(t, cfg, l, "first", shape)
	if got, want := first.Shape(), (vmm.Shape{VCPUs: 1, MemoryMiB: 256}); got != want {
		t.Errorf("the machine has %v, want %v", got, want)
	}
	if s := g.Must(t, cfg, "disk modules"); !strings.HasSuffix(s, " ro") {
		t.Errorf("modules: %s", s)
	}
	// Machines from one snapshot share nothing that they write.
	g.Must(t, cfg, "remember one")
	second, g2 := launch(t, cfg, l, "second", shape)
	g2.Must(t, cfg, "remember two")
	if a, b := g.Must(t, cfg, "recall"), g2.Must(t, cfg, "recall"); a != "one" || b != "two" {
		t.Errorf("the machines recall %q and %q", a, b)
	}
	for _, m := range []vmm.Machine{first, second, first} {
		if err := stop(m); err != nil {
			t.Error(err)
		}
	}
	if n := settled.Load(); n != 1 {
		t.Errorf("booted %d times", n)
	}

	// A bit of the memory flips on the disk, while nobody holds a copy.
	files, _ := filepath.Glob(filepath.Join(cfg.BaseDir(), "*", "memory"))
	if len(files) != 1 {
		t.Fatalf("snapshots: %v", files)
	}
	f, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	for off := int64(20 << 20); b[0] == 0; off++ {
		if _, err := f.ReadAt(b, off); err != nil {
			t.Fatal(err)
		}
		if b[0] != 0 {
			if _, err := f.WriteAt([]byte{b[0] ^ 1}, off); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.Close()
	_, g = launch(t, cfg, l, "rebuilt", shape)
	if n := settled.Load(); n != 2 {
		t.Errorf("booted %d times", n)
	}
	if s := g.Must(t, cfg, "recall"); s != "" {
		t.Errorf("a fresh machine recalls %q", s)
	}
}

// TestLaunchHangs: a guest that doesn't answer is given up for another one.
func TestLaunchHangs(t *testing.T) {
	patient := testguest.Config(t)
	if kvmWorks() {
		t.Skip("this host has KVM")
	}
	cfg := *patient
	cfg.TimeoutScale = 0.05
	var boots atomic.Int32
	l := base.NewLauncher(&cfg, func(ctx context.Context, agent net.Conn) error {
		if boots.Add(1) > 1 {
			return settle(&cfg)(ctx, agent)
		}
		<-ctx.Done()
		cfg.TimeoutScale = patient.TimeoutScale
		return ctx.Err()
	}, slog.Default())
	m, _ := launch(t, patient, l, "hangs", vmm.Shape{VCPUs: 1, MemoryMiB: 256})
	if err := stop(m); err != nil {
		t.Error(err)
	}
	if n := boots.Load(); n != 2 {
		t.Errorf("booted %d times", n)
	}
}

func TestLaunchFails(t *testing.T) {
	cfg := testguest.Config(t)
	boom := errors.New("no agent here")
	for _, tc := range []struct {
		name, want string
		shape      vmm.Shape
		settle     base.Settle
		spoil      func(*config.Config)
	}{
		{name: "too many vCPUs", shape: vmm.Shape{VCPUs: 100_000, MemoryMiB: 256}, want: "100000 vCPUs asked for"},
		{name: "too much memory", shape: vmm.Shape{VCPUs: 1, MemoryMiB: 1 << 40}, want: "MiB of memory asked for"},
		{name: "no QEMU", want: "run the set-up", spoil: func(c *config.Config) { c.Artefacts = t.TempDir() }},
		{name: "no cube-jail", want: "cube-jail", spoil: func(c *config.Config) { c.BinDir = t.TempDir() }},
		{name: "no KVM", want: "set it to auto or tcg", spoil: func(c *config.Config) { c.VM.Accelerator = "kvm" }},
		{name: "an agent that fails", want: "stage agent: no agent here", settle: func(context.Context, net.Conn) error { return boom }},
		{
			name: "a guest that panics", want: "stage boot: guest panicked",
			settle: func(_ context.Context, agent net.Conn) error {
				_, err := testguest.Talk(agent).Do(cfg, "panic")
				return err
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := *cfg
			cfg.StateDir = t.TempDir()
			if tc.spoil != nil {
				tc.spoil(&cfg)
			}
			if tc.name == "no KVM" && kvmWorks() {
				t.Skip("this host has KVM")
			}
			if tc.shape.VCPUs == 0 {
				tc.shape = vmm.Shape{VCPUs: 1, MemoryMiB: 256}
			}
			dir := filepath.Join(cfg.VMDir(), "fails")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			l := base.NewLauncher(&cfg, tc.settle, slog.Default())
			m, err := l.Launch(within(t, cfg.Timeout(2*time.Minute)), vmm.Request{ID: "fails", Dir: dir, Shape: tc.shape})
			if err == nil {
				_ = stop(m)
				t.Fatal("it was launched")
			}
			if !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			for _, pattern := range []string{cfg.VMDir() + "/*", cfg.RunDir + "/uids/*", cfg.BaseDir() + "/[^.]*", cfg.BaseDir() + "/.tmp*", "/sys/fs/cgroup/*/cube/fails-*"} {
				if left, _ := filepath.Glob(pattern); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
			}
		})
	}
}

func kvmWorks() bool {
	cfg := config.Default()
	cfg.VM.Accelerator = "kvm"
	_, err := accel.NewJudge(cfg, slog.Default()).Known("")
	return err == nil
}

// stop ends a machine without waiting for its guest.
func stop(m vmm.Machine) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return m.Stop(ctx)
}

// BenchmarkLaunch is a restore up to the guest's first answer, and the end of the machine: medians.
func BenchmarkLaunch(b *testing.B) {
	cfg := testguest.Config(b)
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	l := base.NewLauncher(cfg, settle(cfg), log)
	shape := vmm.Shape{VCPUs: 1, MemoryMiB: 256}
	warm, err := l.Warm(within(b, cfg.Timeout(3*time.Minute)), shape)
	if err != nil {
		b.Fatal(err)
	}
	defer warm.Release()
	times := make(map[string][]time.Duration)
	for b.Loop() {
		dir := filepath.Join(cfg.VMDir(), "bench")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		note := func(stage string) { times[stage] = append(times[stage], time.Since(start)) }
		m, err := l.Launch(b.Context(), vmm.Request{ID: "bench", Dir: dir, Shape: shape})
		if err != nil {
			b.Fatal(err)
		}
		note("launched")
		testguest.Talk(m.Agent()).Must(b, cfg, "ping")
		note("answered")
		start = time.Now()
		if err := stop(m); err != nil {
			b.Fatal(err)
		}
		note("stopped")
	}
	for stage, d := range times {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, "ms-"+stage)
		b.ReportMetric(float64(d[0].Microseconds())/1000, "ms-"+stage+"-best")
	}
}
