package lifecycle

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Traffic is what was counted of a machine's network since it was last made or resumed.
type Traffic struct {
	TXBytes, RXBytes uint64 // from and to the machine
	// Dropped are packets, by why.
	Dropped map[string]uint64
}

var (
	descSandboxes = prometheus.NewDesc("cube_sandboxes", "Sandboxes, by state.", []string{"state"}, nil)
	descCPUs      = desc("cpus", "CPUs of the sandbox.")
	descCPU       = desc("cpu_used_percent", "CPU that the sandbox uses, in percent of all that it has.")
	descMem       = desc("memory_used_bytes", "Memory that the sandbox uses.")
	descMemTotal  = desc("memory_total_bytes", "Memory of the sandbox.")
	descDisk      = desc("disk_used_bytes", "What is used of the sandbox's disk.")
	descDiskTotal = desc("disk_total_bytes", "Size of the sandbox's disk.")
	descTX        = desc("network_transmit_bytes_total", "Bytes from the sandbox, since it was made or resumed last.")
	descRX        = desc("network_receive_bytes_total", "Bytes to the sandbox, since it was made or resumed last.")
	descDropped   = desc("network_dropped_packets_total", "Packets of the sandbox's that were dropped.", "reason")
)

func desc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("cube_sandbox_"+name, help, append([]string{"sandbox", "team"}, more...), nil)
}

// collectParallel is how many sandboxes are asked at once what they use.
const collectParallel = 8

var _ prometheus.Collector = (*Engine)(nil)

// Describe tells nothing: which metrics there are depends on which sandboxes there are.
func (e *Engine) Describe(chan<- *prometheus.Desc) {}

// Collect tells how many sandboxes there are, how long what was done to them has taken, and what those that run use.
func (e *Engine) Collect(to chan<- prometheus.Metric) {
	e.stages.Collect(to)
	count := map[State]int{}
	for s := range table {
		count[s] = 0
	}
	var running []*box
	e.mu.Lock()
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil {
			count[r.State]++
			if r.State == Running {
				running = append(running, b)
			}
		}
	}
	e.mu.Unlock()
	for s, n := range count {
		to <- prometheus.MustNewConstMetric(descSandboxes, prometheus.GaugeValue, float64(n), string(s))
	}
	turn := make(chan struct{}, collectParallel)
	var all sync.WaitGroup
	for _, b := range running {
		all.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			e.collect(to, b)
		})
	}
	all.Wait()
}

// collect asks one sandbox. What it doesn't tell is left out.
func (e *Engine) collect(to chan<- prometheus.Metric, b *box) {
	r := b.row.Load()
	if r == nil || r.State != Running {
		return
	}
	ctx, cancel := context.WithTimeout(e.life, e.Timeout(measureTimeout))
	defer cancel()
	tell := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, more ...string) {
		to <- prometheus.MustNewConstMetric(d, kind, v, append([]string{r.ID, r.Team}, more...)...)
	}
	if m, err := e.measure(ctx, b, r); err == nil {
		for d, v := range map[*prometheus.Desc]float64{descCPUs: float64(m.CPUs), descCPU: m.CPUUsedPercent, descMem: float64(m.MemUsed),
			descMemTotal: float64(m.MemTotal), descDisk: float64(m.DiskUsed), descDiskTotal: float64(m.DiskTotal)} {
			tell(d, prometheus.GaugeValue, v)
		}
	}
	if t, err := e.machines.Traffic(ctx, r.ID); err == nil {
		tell(descTX, prometheus.CounterValue, float64(t.TXBytes))
		tell(descRX, prometheus.CounterValue, float64(t.RXBytes))
		for why, n := range t.Dropped {
			tell(descDropped, prometheus.CounterValue, float64(n), why)
		}
	}
}
