package lifecycle

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// TestCollect: what runs is measured when somebody asks, and what has been done to it was.
func TestCollect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb, paused := s.create(nil), s.create(nil)
		must(t, s.Pause(t.Context(), team, paused.ID, true))
		registry := prometheus.NewRegistry()
		registry.MustRegister(s.Engine)
		families, err := registry.Gather()
		must(t, err)
		got := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				name := strings.TrimPrefix(f.GetName(), "cube_")
				for _, l := range m.GetLabel() {
					name += " " + l.GetValue()
				}
				got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
		for name, want := range map[string]float64{
			"sandboxes running": 1, "sandboxes paused": 1, "sandboxes killing": 0, "sandbox_cpus " + sb.ID + " default tbase": 2,
			"sandbox_network_transmit_bytes_total " + sb.ID + " default tbase": 1, "sandbox_network_receive_packets_total " + sb.ID + " default tbase": 5,
			"sandbox_network_dropped_packets_total policy " + sb.ID + " default tbase": 3, "sandbox_host_cpu_seconds_total " + sb.ID + " default tbase": 6,
			"sandbox_stage_seconds ok create": 2, "sandbox_stage_seconds ok admit": 2, "sandbox_stage_seconds ok machine": 2, "sandbox_stage_seconds ok envd": 2,
			"sandbox_stage_seconds ok hook": 2, "sandbox_stage_seconds ok start": 2, "sandbox_stage_seconds ok pause": 1, "sandbox_stage_seconds ok row": 6,
		} {
			if v, ok := got[name]; !ok || v != want {
				t.Errorf("%s is %v, not %v", name, v, want)
			}
		}
		for name := range got {
			if strings.Contains(name, paused.ID) {
				t.Errorf("one that is paused is measured: %s", name)
			}
		}
	})
}

// TestMetrics: what was measured is kept for an hour, and what was just measured isn't measured again.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(func(c *Create) { c.Timeout = 4 * time.Hour })
		for range maxMetrics + 10 {
			_, err := s.Metrics(ctx, team, sb.ID, time.Time{}, time.Time{})
			must(t, err)
			all, err := s.Metrics(ctx, team, sb.ID, time.Time{}, time.Time{})
			must(t, err)
			if n := len(all); n > maxMetrics || n > 1 && all[n-1].At.Sub(all[n-2].At) < freshFor {
				t.Fatalf("%d metrics, the last %v", n, all[max(0, n-2):])
			}
			pass(freshFor)
		}
		last, err := s.Metrics(ctx, team, sb.ID, time.Now().Add(-20*time.Second), time.Now().Add(-10*time.Second))
		must(t, err)
		if len(last) < 1 || len(last) > 3 {
			t.Errorf("within ten seconds: %v", last)
		}
		must(t, s.Pause(ctx, team, sb.ID, true))
		if _, err := s.Metrics(ctx, team, sb.ID, time.Time{}, time.Time{}); err != nil {
			t.Errorf("of a paused one: %v", err)
		}
		if _, err := s.Metrics(ctx, "blue", sb.ID, time.Time{}, time.Time{}); !errdefs.IsNotFound(err) {
			t.Errorf("another team's: %v", err)
		}
	})
}

// TestSamples: what sandboxes use is known of the past, too, though nobody has asked; none is asked for those who scrape, and not again
// and again if it doesn't answer.
func TestSamples(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{SampleEvery: 10 * time.Second})
		defer s.stop()
		sb, paused := s.create(nil), s.create(nil)
		must(t, s.Pause(t.Context(), team, paused.ID, true))
		pass(61 * time.Second)
		all, err := s.Metrics(t.Context(), team, sb.ID, time.Time{}, time.Time{})
		must(t, err)
		if len(all) != 6 {
			t.Errorf("%d measurements in a minute", len(all))
		}
		if none, err := s.Metrics(t.Context(), team, paused.ID, time.Time{}, time.Time{}); err != nil || len(none) > 0 {
			t.Errorf("a paused one: %v, %v", none, err)
		}
		asked := func() (n int) {
			s.host.mu.Lock()
			defer s.host.mu.Unlock()
			for _, call := range s.host.calls {
				if strings.HasPrefix(call, "metrics ") {
					n++
				}
			}
			return n
		}
		before := asked()
		registry := prometheus.NewRegistry()
		registry.MustRegister(s.Engine)
		families, err := registry.Gather()
		must(t, err)
		told := slices.ContainsFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "cube_sandbox_memory_used_bytes" })
		if n := asked() - before; n != 0 || !told {
			t.Errorf("sandboxes were asked %d times for a scrape that tells what they use: %v", n, told)
		}
		s.host.luck(func(_ context.Context, call, _ string, _ bool) error {
			if call == "metrics" {
				return errFake
			}
			return nil
		})
		before = asked()
		pass(time.Minute)
		if n := asked() - before; n > 2 {
			t.Errorf("one that doesn't answer was asked %d times in a minute", n)
		}
	})
}

// TestTrace: a create is one trace, with its stages and what has failed.
func TestTrace(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(spans)))
	defer otel.SetTracerProvider(before)
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx, request := otel.Tracer("request").Start(t.Context(), "request")
		_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
		must(t, err)
		request.End()
	})
	var names []string
	ended := spans.Ended()
	for _, span := range ended {
		names = append(names, span.Name())
		if span.SpanContext().TraceID() != ended[len(ended)-1].SpanContext().TraceID() {
			t.Errorf("%s is of another trace", span.Name())
		}
	}
	if got := strings.Join(names, ", "); got != "sandbox admit, sandbox row, sandbox machine, sandbox envd, sandbox hook, sandbox start, sandbox row, sandbox create, request" {
		t.Errorf("the spans are %s", got)
	}
}
