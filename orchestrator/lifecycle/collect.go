package lifecycle

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/admission"
)

// Traffic is what was counted of a machine's network since it was last made or resumed.
type Traffic struct {
	TX, RX Count // from and to the machine
	// Dropped are packets, by why.
	Dropped map[string]uint64
}

// Count is of packets.
type Count struct{ Packets, Bytes uint64 }

// HostUse is what a machine takes of the host, whatever its guest says.
type HostUse struct {
	CPU time.Duration // since it was last made or resumed
	// Memory is what is resident, in bytes, what it shares with others included.
	Memory uint64
}

var (
	descCapacity  = prometheus.NewDesc("cube_admission_capacity", "What sandboxes may have of the host: CPUs, and bytes of memory and disk.", []string{"resource"}, nil)
	descReserved  = prometheus.NewDesc("cube_admission_reserved", "What is reserved of that for the sandboxes that there are.", []string{"resource"}, nil)
	descSpare     = prometheus.NewDesc("cube_admission_spare", "What is reserved of that for machines that are kept ready.", []string{"resource"}, nil)
	descTeam      = prometheus.NewDesc("cube_team_sandboxes", "Sandboxes of a team's that run, or are paused.", []string{"team", "state"}, nil)
	descSandboxes = prometheus.NewDesc("cube_sandboxes", "Sandboxes, by state.", []string{"state"}, nil)
	descHostCPU   = desc("host_cpu_seconds_total", "CPU time of the host that the sandbox's machine has taken since it was made or resumed last.")
	descHostMem   = desc("host_memory_bytes", "Memory of the host that the sandbox's machine has, what it shares with others included.")
	descCPUs      = desc("cpus", "CPUs of the sandbox.")
	descCPU       = desc("cpu_used_percent", "CPU that the sandbox uses, in percent of all that it has, as it says.")
	descMem       = desc("memory_used_bytes", "Memory that the sandbox uses, as it says.")
	descMemCache  = desc("memory_cache_bytes", "Memory of the sandbox that caches files, as it says.")
	descMemTotal  = desc("memory_total_bytes", "Memory of the sandbox.")
	descDisk      = desc("disk_used_bytes", "What is used of the sandbox's disk, as it says.")
	descDiskTotal = desc("disk_total_bytes", "Size of the sandbox's disk.")
	descTX        = desc("network_transmit_bytes_total", "Bytes from the sandbox, since it was made or resumed last.")
	descRX        = desc("network_receive_bytes_total", "Bytes to the sandbox, since it was made or resumed last.")
	descTXPackets = desc("network_transmit_packets_total", "Packets from the sandbox, since it was made or resumed last.")
	descRXPackets = desc("network_receive_packets_total", "Packets to the sandbox, since it was made or resumed last.")
	descDropped   = desc("network_dropped_packets_total", "Packets of the sandbox's that were dropped.", "reason")
)

func desc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("cube_sandbox_"+name, help, append([]string{"sandbox", "team", "template"}, more...), nil)
}

var _ prometheus.Collector = (*Engine)(nil)

// Describe tells nothing: which metrics there are depends on which sandboxes there are.
func (e *Engine) Describe(chan<- *prometheus.Desc) {}

// Collect tells how many sandboxes there are, how long what was done to them has taken, and what those that run use. Where they are
// asked regularly none is asked for it.
func (e *Engine) Collect(to chan<- prometheus.Metric) {
	e.stages.Collect(to)
	e.refusals.Collect(to)
	e.pool.collect(to)
	e.collectRoom(to)
	count := map[State]int{}
	for s := range table {
		count[s] = 0
	}
	e.mu.Lock()
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil {
			count[r.State]++
		}
	}
	e.mu.Unlock()
	for s, n := range count {
		to <- prometheus.MustNewConstMetric(descSandboxes, prometheus.GaugeValue, float64(n), string(s))
	}
	ctx, cancel := context.WithTimeout(e.life, e.Timeout(collectTimeout))
	defer cancel()
	use, err := e.machines.Use(ctx)
	if err != nil {
		e.Log.Warn("what machines take of the host can't all be told", "error", err)
	}
	e.each(e.running(), func(b *box) { e.collect(ctx, to, b, use) })
}

func newRefusals() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cube_admission_refusals_total", Help: "Sandboxes and snapshots that weren't let in, by what there wasn't enough of.",
	}, []string{"reason"})
}

// collectRoom tells what is reserved.
func (e *Engine) collectRoom(to chan<- prometheus.Metric) {
	amount := func(d *prometheus.Desc, a admission.Amount) {
		for resource, v := range map[string]float64{"cpu": float64(a.MilliCPU) / 1000, "memory": float64(a.Memory), "disk": float64(a.Disk)} {
			to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, resource)
		}
	}
	reading, err := e.Host.Read()
	if err == nil {
		amount(descCapacity, admission.Capacity(e.Admission, reading))
	} else {
		e.Log.Warn("it isn't known what the host has", "error", err)
	}
	totals := e.ledger.Totals()
	amount(descReserved, totals.Reserved)
	amount(descSpare, totals.Spare)
	for team, use := range totals.Teams {
		to <- prometheus.MustNewConstMetric(descTeam, prometheus.GaugeValue, float64(use.Running), team, string(Running))
		to <- prometheus.MustNewConstMetric(descTeam, prometheus.GaugeValue, float64(use.Paused), team, string(Paused))
	}
}

// collectTimeout bounds all of it: Prometheus's own is 10 s.
const collectTimeout = 8 * time.Second

// staleAfter is how old the latest measurement may be to be told.
const staleAfter = time.Minute

// collect tells of one sandbox. What isn't known is left out.
func (e *Engine) collect(ctx context.Context, to chan<- prometheus.Metric, b *box, use map[string]HostUse) {
	r := b.row.Load()
	if r == nil || r.State != Running {
		return
	}
	tell := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, more ...string) {
		to <- prometheus.MustNewConstMetric(d, kind, v, append([]string{r.ID, r.Team, r.TemplateID}, more...)...)
	}
	if u, ok := use[r.ID]; ok {
		tell(descHostCPU, prometheus.CounterValue, u.CPU.Seconds())
		tell(descHostMem, prometheus.GaugeValue, float64(u.Memory))
	}
	m, ok := b.fresh(staleAfter)
	if e.SampleEvery == 0 {
		var err error
		m, err = e.measure(ctx, b, r)
		ok = err == nil
	}
	if ok {
		for d, v := range map[*prometheus.Desc]float64{descCPUs: float64(m.CPUs), descCPU: m.CPUUsedPercent, descMem: float64(m.MemUsed), descMemCache: float64(m.MemCached),
			descMemTotal: float64(m.MemTotal), descDisk: float64(m.DiskUsed), descDiskTotal: float64(m.DiskTotal)} {
			tell(d, prometheus.GaugeValue, v)
		}
	}
	if t, err := e.machines.Traffic(ctx, r.ID); err == nil {
		for d, v := range map[*prometheus.Desc]uint64{descTX: t.TX.Bytes, descRX: t.RX.Bytes, descTXPackets: t.TX.Packets, descRXPackets: t.RX.Packets} {
			tell(d, prometheus.CounterValue, float64(v))
		}
		for why, n := range t.Dropped {
			tell(descDropped, prometheus.CounterValue, float64(n), why)
		}
	}
}
