package batch

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
)

// measured is all that a registry has, by name and label; of a histogram how often, and with _sum how much.
func measured(t *testing.T, from *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			switch {
			case m.Histogram != nil:
				all[name], all[name+" sum"] = float64(m.Histogram.GetSampleCount()), m.Histogram.GetSampleSum()
			case m.Gauge != nil:
				all[name] = m.Gauge.GetValue()
			default:
				all[name] = m.Counter.GetValue()
			}
		}
	}
	return all
}

// TestMetrics: what is told of batches is what has become of them, and what goes on.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := prometheus.NewRegistry()
		m := NewMetrics(r)
		sees := func(when string, want map[string]float64) {
			t.Helper()
			got := measured(t, r)
			for name, v := range want {
				if has, ok := got[name]; !ok || has != v {
					t.Errorf("%s: %s is %v, not %v", when, name, has, v)
				}
			}
		}
		sees("before", map[string]float64{"cube_batch_items_total ok": 0, "cube_batches_total given_up": 0, "cube_batches_running": 0})
		h := newHost(100)
		b := newBatch(h, 5)
		b.Metrics = m
		for i, do := range []string{"work", "work", "fail", "hang", "work"} {
			b.Envs[i]["DO"] = do
		}
		h.fails = func(n int) error {
			if n == 5 {
				return errdefs.ErrNotFound.WithMessage("template 'base' not found")
			}
			return nil
		}
		time.AfterFunc(30*time.Second, func() {
			sees("amid it", map[string]float64{"cube_batches_running": 1, "cube_batch_sandboxes": 1, "cube_batch_items_total timeout": 0})
		})
		_, sum := collect(t, t.Context(), b)
		after := map[string]float64{"cube_batches_running": 0, "cube_batch_sandboxes": 0, "cube_batches_total finished": 1}
		for status, n := range sum.Count {
			after["cube_batch_items_total "+string(status)] = float64(n)
		}
		after["cube_batch_item_seconds wait"], after["cube_batch_item_seconds create"], after["cube_batch_item_seconds run"] = 5, 4, 4
		after["cube_batch_item_seconds create sum"] = 4
		sees("after it", after)

		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(1500*time.Millisecond, func() { cancel(errors.New("the client has gone")) })
		b = newBatch(h, 50)
		b.Metrics = m
		if _, err := b.Run(ctx, func(Result) error { return nil }); err == nil {
			t.Error("it isn't given up")
		}
		after["cube_batches_total given_up"] = 1
		sees("given up", after) // whose items nobody was told of
	})
}
