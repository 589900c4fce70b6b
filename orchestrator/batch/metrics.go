package batch

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are what is measured of all batches that are run with them.
type Metrics struct {
	batches   prometheus.Gauge
	ended     *prometheus.CounterVec
	items     *prometheus.CounterVec
	sandboxes prometheus.Gauge
	took      *prometheus.HistogramVec
}

// What a batch comes to, as a label.
const (
	throughAll = "finished"
	givenUp    = "given_up"
)

// Parts of an item's time, as labels.
const (
	partWait   = "wait" // for its sandbox to be begun
	partCreate = "create"
	partRun    = "run"
)

// NewMetrics makes them, and has them be told.
func NewMetrics(to prometheus.Registerer) *Metrics {
	m := &Metrics{
		batches: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "cube_batches_running", Help: "Batches that are under way.",
		}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cube_batches_total", Help: "Batches that have ended: they are finished, or were given up since nobody was there to be told or cube was being stopped.",
		}, []string{"result"}),
		items: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cube_batch_items_total", Help: "Items of batches whose result was told, by what it is.",
		}, []string{"status"}),
		sandboxes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "cube_batch_sandboxes", Help: "Sandboxes of batches, those that are being made and removed included.",
		}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cube_batch_item_seconds", Help: "Time that parts of an item take: wait, until its sandbox is begun, create, and run, its command.",
			Buckets: []float64{.025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
		}, []string{"part"}),
	}
	for _, s := range []Status{OK, Failed, Refused, Timeout} { // so that the first one is an increase
		m.items.WithLabelValues(string(s))
	}
	for _, r := range []string{throughAll, givenUp} {
		m.ended.WithLabelValues(r)
	}
	to.MustRegister(m.batches, m.ended, m.items, m.sandboxes, m.took)
	return m
}

// ends counts the end of a batch.
func (m *Metrics) ends(err error) {
	m.batches.Dec()
	result := throughAll
	if err != nil {
		result = givenUp
	}
	m.ended.WithLabelValues(result).Inc()
}

// item counts a result.
func (m *Metrics) item(r Result) {
	m.items.WithLabelValues(string(r.Status)).Inc()
	parts := map[string]time.Duration{partWait: r.Waited}
	if r.SandboxID != "" {
		parts[partCreate], parts[partRun] = r.Made, r.Ran
	}
	for part, d := range parts {
		m.took.WithLabelValues(part).Observe(d.Seconds())
	}
}
