// Package admission is whether there is room for another sandbox: what is reserved for each, what teams and the host have left, and
// how hard pressed the host is. It keeps accounts in memory of what others have written down, and knows nothing of machines.
package admission

import (
	"fmt"
	"math"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
)

// Profile is how much of what a sandbox has is reserved for it.
type Profile string

const (
	// Disposable: a part, by the factors of the configuration. The rest is whoever's takes it first.
	Disposable Profile = "disposable"
	// Resident: all of it.
	Resident Profile = "resident"
)

// ParseProfile reads one, "" is none. The error is errdefs.ErrInvalidArgument.
func ParseProfile(s string) (Profile, error) {
	switch p := Profile(s); p {
	case "", Disposable, Resident:
		return p, nil
	}
	return "", errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%q is not a profile of sandboxes, which are %s and %s", s, Disposable, Resident))
}

// Shape is what a sandbox has; sizes are in MiB.
type Shape struct {
	VCPUs, MemoryMB, DiskMB int
	Profile                 Profile // "" is Disposable
}

// Amount is of the host's.
type Amount struct {
	MilliCPU     int64 // thousandths of a CPU
	Memory, Disk int64 // bytes
}

func (a Amount) plus(b Amount) Amount {
	return Amount{a.MilliCPU + b.MilliCPU, a.Memory + b.Memory, a.Disk + b.Disk}
}

func (a Amount) minus(b Amount) Amount {
	return Amount{a.MilliCPU - b.MilliCPU, a.Memory - b.Memory, a.Disk - b.Disk}
}

// ProcessMemory is what the processes of a machine take beside its memory: measured are 30 to 45 MiB of QEMU's under emulation and 17
// to 25 of the shim's (docs/performance.md).
const ProcessMemory = 64 << 20

// Need is what is reserved for a sandbox that runs.
func Need(a *config.Admission, s Shape) Amount {
	cpu, memory, disk := int64(s.VCPUs)*1000, int64(s.MemoryMB)<<20, int64(s.DiskMB)<<20
	if s.Profile == Resident {
		return Amount{cpu, memory + ProcessMemory, disk}
	}
	return Amount{
		MilliCPU: share(cpu, a.CPUOvercommit),
		Memory:   max(share(memory, a.MemoryOvercommit), min(memory, int64(a.DisposableMemory))),
		Disk:     share(disk, a.DiskOvercommit),
	}
}

func share(n int64, factor float64) int64 { return int64(math.Ceil(float64(n) / factor)) }

// Capacity is what can be reserved of a host.
func Capacity(a *config.Admission, h Reading) Amount {
	return Amount{int64(h.CPUs) * 1000, max(h.MemoryTotal-int64(a.MemoryHeadroom), 0), h.DiskTotal}
}

// Never says what a host has too little of for a sandbox even if there is no other: errdefs.ErrFailedPrecondition, nil for nothing.
func Never(a *config.Admission, s Shape, h Reading) error {
	need, all := Need(a, s), Capacity(a, h)
	what := ""
	switch {
	case need.MilliCPU > all.MilliCPU:
		what = fmt.Sprintf("%s CPUs are reserved, and it has %s", cpus(need.MilliCPU), cpus(all.MilliCPU))
	case need.Memory > all.Memory:
		what = fmt.Sprintf("%d MiB of memory are reserved, and it has %d beside its headroom", mib(need.Memory), mib(all.Memory))
	case need.Disk > all.Disk:
		what = fmt.Sprintf("%d MiB of disk are reserved, and its store has %d", mib(need.Disk), mib(all.Disk))
	default:
		return nil
	}
	return errdefs.ErrFailedPrecondition.WithMessage("this host has no room for a sandbox of that size: " + what + ": ask for less, or see [admission] of the configuration")
}
