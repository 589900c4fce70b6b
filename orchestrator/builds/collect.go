package builds

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/db"
)

var _ prometheus.Collector = (*Service)(nil)

// collectors are what is measured of builds.
type collectors struct {
	pending *prometheus.Desc
	took    *prometheus.HistogramVec
}

func newCollectors() collectors {
	return collectors{
		pending: prometheus.NewDesc("cube_template_builds", "Builds of templates that wait for their turn or go on.", []string{"state"}, nil),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "cube_template_build_seconds",
			Help:    "Time that a build of a template has taken from its turn on, by what has become of it.",
			Buckets: []float64{1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 3600},
		}, []string{"state"}),
	}
}

// Describe is of prometheus.Collector.
func (s *Service) Describe(to chan<- *prometheus.Desc) {
	to <- s.measured.pending
	s.measured.took.Describe(to)
}

// Collect is of prometheus.Collector.
func (s *Service) Collect(to chan<- prometheus.Metric) {
	s.mu.Lock()
	queued, going := len(s.queue), len(s.going)
	s.mu.Unlock()
	to <- prometheus.MustNewConstMetric(s.measured.pending, prometheus.GaugeValue, float64(queued), string(db.JobQueued))
	to <- prometheus.MustNewConstMetric(s.measured.pending, prometheus.GaugeValue, float64(going), string(db.JobBuilding))
	s.measured.took.Collect(to)
}
