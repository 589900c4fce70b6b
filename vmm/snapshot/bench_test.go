package snapshot_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
)

// laps collects times by stage.
type laps map[string][]time.Duration

func (l laps) note(stage string, d time.Duration) { l[stage] = append(l[stage], d) }

// report reports the medians.
func (l laps) report(b *testing.B) {
	for stage, d := range l {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, "ms-"+stage)
	}
}

// BenchmarkSave is a save of a running machine that has written that much of its memory: how long the guest stands still,
// and all of it with digests and on the disk.
func BenchmarkSave(b *testing.B) {
	for _, tc := range []struct{ memory, written int }{{256, 0}, {256, 10}, {256, 100}, {2048, 0}, {2048, 500}} {
		b.Run(fmt.Sprintf("%dof%dMiB", tc.written, tc.memory), func(b *testing.B) {
			h := newHost(b, testfs.XFS(b, 4<<30))
			m := h.must(b, vmm.Request{ID: "bench", Root: h.image(b, "bench", 1<<30), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: tc.memory}})
			m.Must(b, h.cfg, "hog %d", tc.written)
			times := laps{}
			var written []int64
			for b.Loop() {
				began := time.Now()
				info, saved := h.measured(b, m)
				times.note("save", time.Since(began))
				times.note("stopped", saved.Stopped)
				written = append(written, saved.Memory.Bytes)
				if _, err := h.store.Delete(info); err != nil {
					b.Fatal(err)
				}
			}
			times.report(b)
			slices.Sort(written)
			b.ReportMetric(float64(written[len(written)/2])/(1<<20), "MiB-written")
		})
	}
}

// measured saves a machine, and tells what its driver has said.
func (h *host) measured(b *testing.B, m *machine) (string, *vmm.Saved) {
	b.Helper()
	w := &witness{Machine: m.Machine}
	info, err := h.store.Save(b.Context(), "bench", w, &rest{}, nil)
	if err != nil {
		b.Fatal(err)
	}
	return info.ID, w.saved
}

// BenchmarkRestore is a restore of a snapshot to the guest's first and second answer: when nobody holds its memory, and when
// somebody does.
func BenchmarkRestore(b *testing.B) {
	for name, held := range map[string]bool{"alone": false, "held": true} {
		b.Run(name, func(b *testing.B) {
			h := newHost(b, testfs.XFS(b, 4<<30))
			m := h.fresh(b, "bench")
			m.Must(b, h.cfg, "hog 20")
			h.save(b, "bench", m)
			if err := stop(m); err != nil {
				b.Fatal(err)
			}
			if held {
				o, err := h.store.Open("bench", "bench")
				if err != nil {
					b.Fatal(err)
				}
				defer o.Close()
				held, err := o.Hold(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				defer held.Release()
			}
			times := laps{}
			n := 0
			for b.Loop() {
				n++
				began := time.Now()
				c := h.must(b, vmm.Request{ID: fmt.Sprint("clone-", n), Snapshot: "bench"})
				times.note("launched", time.Since(began))
				c.Must(b, h.cfg, "ping")
				times.note("answered", time.Since(began))
				again := time.Now()
				c.Must(b, h.cfg, "ping")
				times.note("second", time.Since(again))
				if err := stop(c); err != nil {
					b.Fatal(err)
				}
			}
			times.report(b)
		})
	}
}
