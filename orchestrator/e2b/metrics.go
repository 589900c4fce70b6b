package e2b

import (
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// maxMetricIDs is how many sandboxes metrics can be had of at once.
const maxMetricIDs = 100

// metricsParallel is how many of them are asked at once: one that doesn't answer takes its time.
const metricsParallel = 16

// metricsAge is how old the newest metric may be where only that is asked for.
const metricsAge = time.Minute

// metricBody is what a sandbox used at a moment; sizes are in bytes.
type metricBody struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int       `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       int64     `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      int64     `json:"memCache"`
	DiskUsed      int64     `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

func metric(m lifecycle.Metric) metricBody {
	return metricBody{
		Timestamp: m.At.UTC(), TimestampUnix: m.At.Unix(), CPUCount: m.CPUs, CPUUsedPct: m.CPUUsedPercent,
		MemUsed: m.MemUsed, MemTotal: m.MemTotal, MemCache: m.MemCached, DiskUsed: m.DiskUsed, DiskTotal: m.DiskTotal,
	}
}

func (s *Server) metrics(c *call, id string) (answer, error) {
	from, to := c.query.unix("start"), c.query.unix("end")
	if !to.IsZero() && from.After(to) {
		c.query.fail("start", "it is after end")
	}
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	all, err := s.engine.Metrics(c.ctx, c.team, id, from, to)
	if err != nil {
		return answer{}, err
	}
	bodies := make([]metricBody, 0, len(all))
	for _, m := range all {
		bodies = append(bodies, metric(m))
	}
	return ok(bodies), nil
}

// metricsOfMany are the newest of each sandbox. Those that there are none of are left out.
func (s *Server) metricsOfMany(c *call) (answer, error) {
	const name = "sandbox_ids"
	ids := c.query.list(name)
	switch {
	case len(ids) == 0:
		c.query.fail(name, "it is required")
	case len(ids) > maxMetricIDs:
		c.query.fail(name, "there are %d ids, there can be %d", len(ids), maxMetricIDs)
	}
	for i, s := range ids {
		var err error
		ids[i], err = parseSandboxID(name, s)
		c.note(err)
	}
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	newest := map[string]metricBody{}
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(c.ctx)
	group.SetLimit(metricsParallel)
	for _, id := range ids {
		group.Go(func() error {
			all, err := s.engine.Metrics(ctx, c.team, id, time.Now().Add(-metricsAge), time.Time{})
			if err != nil && !errdefs.IsNotFound(err) {
				return err
			}
			if len(all) > 0 {
				mu.Lock()
				defer mu.Unlock()
				newest[id] = metric(all[len(all)-1])
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return answer{}, err
	}
	return ok(map[string]any{"sandboxes": newest}), nil
}
