package admission

import (
	"strconv"

	"github.com/docker/go-units"
)

// fits says no with what the host is short of, where more is needed than before. mu is held.
func (l *Ledger) fits(was, is Amount, h Reading) error {
	more := is.minus(was)
	if more.MilliCPU > 0 || more.Memory > 0 {
		if r := l.brake(h.Pressure); r != nil {
			return r
		}
	}
	all := Capacity(l.policy, h)
	left := all.minus(l.reserved)
	no := lack(more, left, all, h)
	if no == nil {
		return nil
	}
	h.DiskFree += l.spare.Disk
	no.Spared = lack(more, left.plus(l.spare), all, h) == nil
	return no
}

// lack says what is left too little of, nil for nothing.
func lack(more, left, all Amount, h Reading) *Refusal {
	switch {
	case more.MilliCPU > 0 && more.MilliCPU > left.MilliCPU:
		return Short(ReasonCPU, hostAfter, "the host has %s of its %s CPUs left for sandboxes and this one needs %s: kill or pause one", cpus(left.MilliCPU), cpus(all.MilliCPU), cpus(more.MilliCPU))
	case more.Memory > 0 && more.Memory > left.Memory:
		return Short(ReasonMemory, hostAfter, "the host has %d of its %d MiB of memory left for sandboxes and this one needs %d MiB: kill or pause one", mib(left.Memory), mib(all.Memory), mib(more.Memory))
	case more.Disk > 0 && more.Disk > min(left.Disk, h.DiskFree):
		return Short(ReasonDisk, hostAfter, "the store has %d of its %d MiB left for sandboxes and this one needs %d MiB: kill one, also of those that are paused, or see what `cube df` tells and `cube prune` frees",
			mib(min(left.Disk, h.DiskFree)), mib(all.Disk), mib(more.Disk))
	}
	return nil
}

// brake says no where something on the host has waited too much.
func (l *Ledger) brake(p Pressure) *Refusal {
	for _, b := range []struct {
		name string
		is   float64
		most int
	}{{"memory", p.Memory, l.policy.MemoryPressure}, {"io", p.IO, l.policy.IOPressure}, {"cpu", p.CPU, l.policy.CPUPressure}} {
		if p.Known && b.most > 0 && b.is >= float64(b.most) {
			return Short(pressurePrefix+b.name, hostAfter, "the host is short of %s: something has waited for it in %.0f %% of the last 10 s, and from %d %% on (admission.%[1]s_pressure) nothing is started: try again", b.name, b.is, b.most)
		}
	}
	return nil
}

// Room is how many sandboxes more there is room for, and what is short then: a reason as in a Refusal. left is the memory that is
// there for machines to be started.
func (l *Ledger) Room(team string, s Shape, h Reading, left int64) (n int, short string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.brake(h.Pressure); r != nil {
		return 0, r.Reason
	}
	n = -1
	least := func(of, need int64, reason string) {
		if need <= 0 {
			return
		}
		if k := int(max(of, 0) / need); n < 0 || k < n {
			n, short = k, reason
		}
	}
	need := Need(l.policy, s)
	free := Capacity(l.policy, h).minus(l.reserved).plus(l.spare) // which is given up
	least(free.MilliCPU, need.MilliCPU, ReasonCPU)
	least(free.Memory, need.Memory, ReasonMemory)
	least(left, need.Memory, ReasonAvailable)
	least(min(free.Disk, h.DiskFree), need.Disk, ReasonDisk)
	limits, _ := l.limits.Of(team)
	var use Use
	if t := l.teams[team]; t != nil {
		use = t.Use
	}
	for _, m := range measures(limits, use, Use{}.with(&Entry{Shape: s, Machine: true}, 1)) {
		if m.limit > 0 {
			least(m.limit-m.use, m.more, teamPrefix+m.key)
		}
	}
	return max(n, 0), short
}

func mib(n int64) int64 { return max(n, 0) >> 20 }

// cpus is a number of CPUs, to the thousandth.
func cpus(milli int64) string { return strconv.FormatFloat(float64(max(milli, 0))/1000, 'f', -1, 64) }

func size(n int64) string { return units.BytesSize(float64(n)) }
