package qemu_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/qemu"
)

// BenchmarkPlugged and BenchmarkRoot are what a disk costs in a machine just restored, plugged in and as its root: until
// QEMU has it, until the guest has it, and until the guest has read from it.
func BenchmarkPlugged(b *testing.B) { benchmarkDisk(b, false) }
func BenchmarkRoot(b *testing.B)    { benchmarkDisk(b, true) }

func benchmarkDisk(b *testing.B, root bool) {
	cfg := testguest.Config(b)
	f := image(b, b.TempDir(), 64<<20)
	restoreSpec(b, cfg, "template-made")
	var first, second, added, found, read time.Duration
	n := 0
	for b.Loop() {
		n++
		s := restoreSpec(b, cfg, "bench")
		serial := "plugged"
		if root {
			s.Root, serial = f, vmm.RootSerial
		}
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
		if !root {
			if err := m.AddDisk(b.Context(), vmm.Disk{Serial: serial, File: f}); err != nil {
				b.Fatal(err)
			}
		}
		note(&added)
		g.Must(b, cfg, "disk %s", serial)
		note(&found)
		g.Must(b, cfg, "read %s", serial)
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
