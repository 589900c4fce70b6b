package proxy

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	requests = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cube_ingress_requests_total",
		Help: "Requests by the class of what was answered: 1xx (upgraded) to 5xx of sandboxes' servers, refused (the proxy's own answers), gone (the client left before an answer).",
	}, []string{"class"})
	openStreams = prometheus.NewGauge(prometheus.GaugeOpts{Name: "cube_ingress_open_streams", Help: "Requests and upgraded connections that are open."})
	cutStreams  = prometheus.NewCounter(prometheus.CounterOpts{Name: "cube_ingress_cut_streams_total", Help: "Requests and upgraded connections that were cut because their sandbox's machine has ended."})
	wakeSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "cube_ingress_wake_seconds", Help: "How long paused sandboxes took to be woken by a request, by result: ok, failed.",
		Buckets: []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	}, []string{"result"})
)

// Collectors are the metrics of all proxies of this process.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{requests, openStreams, cutStreams, wakeSeconds}
}

func result(err error) string {
	if err != nil {
		return "failed"
	}
	return "ok"
}

// class of a status that a sandbox's server has given; 0 is none.
func class(status int) string {
	if status == 0 {
		return "gone"
	}
	return strconv.Itoa(status/100) + "xx"
}
