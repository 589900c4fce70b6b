package base_test

import (
	"context"
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
)

func TestMain(m *testing.M) {
	code := m.Run()
	testguest.Remove()
	os.Exit(code)
}

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
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := m.Stop(ctx); err != nil {
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

func TestLaunch(t *testing.T) {
	cfg := testguest.Config(t)
	l := base.NewLauncher(cfg, settle(cfg), slog.Default())
	for _, id := range []string{"first", "second", "third"} {
		m, g := launch(t, cfg, l, id, vmm.Shape{VCPUs: 1, MemoryMiB: 200})
		t.Log(m.Shape(), g.Must(t, cfg, "memory"), g.Must(t, cfg, "disk modules"))
	}
}

// BenchmarkLaunch is a restore up to the guest's first answer, and the end of the machine.
func BenchmarkLaunch(b *testing.B) {
	cfg := testguest.Config(b)
	l := base.NewLauncher(cfg, settle(cfg), slog.New(slog.DiscardHandler))
	warm, err := l.Warm(within(b, cfg.Timeout(3*time.Minute)), vmm.Shape{VCPUs: 1, MemoryMiB: 256})
	if err != nil {
		b.Fatal(err)
	}
	defer warm.Release()
	var launched, answered, stopped time.Duration
	n := 0
	for b.Loop() {
		n++
		dir := filepath.Join(cfg.VMDir(), "bench")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		m, err := l.Launch(b.Context(), vmm.Request{ID: "bench", Dir: dir, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}})
		if err != nil {
			b.Fatal(err)
		}
		launched += time.Since(start)
		testguest.Talk(m.Agent()).Must(b, cfg, "ping")
		answered += time.Since(start)
		ctx, cancel := context.WithCancel(b.Context())
		cancel()
		start = time.Now()
		if err := m.Stop(ctx); err != nil {
			b.Fatal(err)
		}
		stopped += time.Since(start)
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(n) }
	b.ReportMetric(ms(launched), "ms-launch")
	b.ReportMetric(ms(answered), "ms-answer")
	b.ReportMetric(ms(stopped), "ms-stop")
}
