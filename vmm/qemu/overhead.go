package qemu

import (
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/cgroup"
)

const (
	// tcgCacheMiB is QEMU's buffer for translated code.
	tcgCacheMiB = 32
)

// limits are the machine's, for its cgroup.
func limits(s *Spec) cgroup.Limits {
	cpus := s.CPULimit
	if cpus == 0 {
		cpus = float64(s.Shape.VCPUs)
	}
	overhead := 96
	if s.Accel == accel.TCG {
		overhead += 64 + tcgCacheMiB
	}
	return cgroup.Limits{
		CPUs:   cpus,
		Memory: int64(s.Shape.MemoryMiB+overhead) << 20,
		PIDs:   int64(s.Shape.VCPUs) + 96,
	}
}
