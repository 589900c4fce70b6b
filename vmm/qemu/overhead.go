package qemu

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

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
func limits(s *Spec) (cgroup.Limits, error) {
	mib := s.Shape.MemoryMiB + overheadMiB + perVCPUMiB*s.Shape.VCPUs
	if s.Accel == accel.TCG {
		mib += tcgCacheMiB
	}
	size := int64(mib) << 20
	if !s.Share {
		holes, err := holes(s.Memory)
		if err != nil {
			return cgroup.Limits{}, err
		}
		size += holes
	}
	return cgroup.Limits{CPUs: hostCPUs(s.CPULimit, s.Shape), Memory: size, PIDs: int64(s.Shape.VCPUs + extraTasks)}, nil
}

// holes is how much of a memory file has no pages yet, in bytes. A machine that maps it privately can come to be charged for that
// besides its own copy: tmpfs has no page of zeros to show, so whoever first reads or writes in a hole has the kernel give the file
// its page, too, which is then there for all who map it.
func holes(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look how much the memory file has: %w", err)
	}
	return max(st.Size-st.Blocks*512, 0), nil
}

// hostCPUs is the host CPU time for a machine of that shape with that vmm.Request.CPULimit.
func hostCPUs(limit float64, shape vmm.Shape) float64 {
	if limit == 0 {
		return float64(shape.VCPUs)
	}
	return min(limit, float64(shape.VCPUs))
}
