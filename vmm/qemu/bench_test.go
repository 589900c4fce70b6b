package qemu_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/qemu"
)

// BenchmarkPlug is what a container's root disk costs in a machine just restored: until QEMU has it, until the guest has
// it, and until the guest has read from it.
func BenchmarkPlug(b *testing.B) {
	cfg := testguest.Config(b)
	f := image(b, b.TempDir(), 64<<20)
	restoreSpec(b, cfg, "template-made")
	var first, second, added, found, read time.Duration
	n := 0
	for b.Loop() {
		n++
		s := restoreSpec(b, cfg, "bench")
		m, err := qemu.NewDriver(cfg, slog.New(slog.DiscardHandler)).Start(b.Context(), s)
		if err != nil {
			b.Fatal(err)
		}
		g := testguest.Talk(m.Agent())
		lap := time.Now()
		note := func(d *time.Duration) { *d += time.Since(lap); lap = time.Now() }
		g.Must(b, cfg, "ping")
		note(&first)
		g.Must(b, cfg, "ping")
		note(&second)
		if err := m.AddDisk(b.Context(), vmm.Disk{Serial: "root", File: f}); err != nil {
			b.Fatal(err)
		}
		note(&added)
		g.Must(b, cfg, "disk root")
		note(&found)
		g.Must(b, cfg, "read root")
		note(&read)
		if err := m.Stop(gone()); err != nil {
			b.Fatal(err)
		}
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(n) }
	b.ReportMetric(ms(first), "ms-first-ping")
	b.ReportMetric(ms(second), "ms-ping")
	b.ReportMetric(ms(added), "ms-add")
	b.ReportMetric(ms(found), "ms-found")
	b.ReportMetric(ms(read), "ms-read")
}
