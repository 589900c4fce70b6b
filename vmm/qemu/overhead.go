package qemu

import (
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/cgroup"
)

// What a machine's process needs beside the guest's memory. Measured with QEMU 7.2 (TestMemoryHog, TestFootprint): an
// idle emulated machine has 30 MiB of its own, of which guest memory is 1 and translated code 10; one whose guest had run
// out of its 256 MiB took 244 MiB at the peak, about 45 of them not the guest's. Allowed is twice that, since a group at
// its limit doesn't get slower but is killed.
const (
	overheadMiB = 96
	// perVCPUMiB is for a thread with its stack and its caches.
	perVCPUMiB = 4
	// tcgCacheMiB is QEMU's buffer for translated code.
	tcgCacheMiB = 64
)

// extraTasks bounds the threads that aren't vCPUs: QEMU's own and its pool for disk accesses, which has up to 64
// (util/thread-pool.c).
const extraTasks = 80

// limits are the machine's, for its cgroup.
func limits(s *Spec) cgroup.Limits {
	mib := s.Shape.MemoryMiB + overheadMiB + perVCPUMiB*s.Shape.VCPUs
	if s.Accel == accel.TCG {
		mib += tcgCacheMiB
	}
	return cgroup.Limits{CPUs: hostCPUs(s.CPULimit, s.Shape), Memory: int64(mib) << 20, PIDs: int64(s.Shape.VCPUs + extraTasks)}
}

// hostCPUs is the host CPU time for a machine of that shape with that vmm.Request.CPULimit.
func hostCPUs(limit float64, shape vmm.Shape) float64 {
	if limit == 0 {
		return float64(shape.VCPUs)
	}
	return min(limit, float64(shape.VCPUs))
}
