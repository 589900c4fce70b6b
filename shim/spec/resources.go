package spec

import (
	"reflect"
	"slices"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
)

func resources(p *Plan, _ *config.Config) error {
	if r := p.Guest.Linux.Resources; r != nil {
		return forGuest(r, p.drop)
	}
	return nil
}

// Update judges a change of the limits of a container in a machine of that shape, and returns what the guest is to
// change: r, which it takes over, without what only means something on the host. cpus is the container's new CPU limit
// in CPUs: all that the machine has where a limit is lifted, 0 where it stays as it is.
func Update(r *specs.LinuxResources, shape vmm.Shape) (guest *specs.LinuxResources, cpus float64, err error) {
	if r == nil {
		return nil, 0, invalid("the update names no resources")
	}
	if err := MemoryFits(r, shape); err != nil {
		return nil, 0, err
	}
	if cpus, err = cpuLimit(r, shape); err != nil {
		return nil, 0, err
	}
	if err := forGuest(r, func(string) {}); err != nil {
		return nil, 0, err
	}
	r.Devices = nil // these rules are for good; clients send all of the spec's resources for an update of one
	if reflect.ValueOf(*r).IsZero() {
		return nil, 0, invalid("the update names no limit that a container in a virtual machine has")
	}
	return r, cpus, nil
}

// MemoryFits refuses a memory limit that is more than a machine of that shape has.
func MemoryFits(r *specs.LinuxResources, shape vmm.Shape) error {
	has := int64(shape.MemoryMiB) << 20
	if r == nil || r.Memory == nil || r.Memory.Limit == nil || *r.Memory.Limit <= has {
		return nil
	}
	return unsupported("memory limit %s is more than the machine has (%s): make it larger with the annotation %s",
		bytesSize(*r.Memory.Limit), bytesSize(has), Memory)
}

func cpuLimit(r *specs.LinuxResources, shape vmm.Shape) (float64, error) {
	if r.CPU == nil || r.CPU.Quota == nil || *r.CPU.Quota == 0 {
		return 0, nil
	}
	has := float64(shape.VCPUs)
	limit := cpus(*r.CPU.Quota, r.CPU.Period)
	if limit == 0 {
		return has, nil
	}
	if limit > has {
		return 0, unsupported("a CPU limit of %s CPUs is more than the machine has (%d): give it more with the annotation %s",
			strconv.FormatFloat(limit, 'g', 4, 64), shape.VCPUs, VCPUs)
	}
	return limit, nil
}

// forGuest drops the numbering of the host (CPUs, memory nodes, network classes), what only exists in cgroup v1, and
// refuses what names devices of the host.
func forGuest(r *specs.LinuxResources, drop func(string)) error {
	if b := r.BlockIO; b != nil {
		if len(b.WeightDevice)+len(b.ThrottleReadBpsDevice)+len(b.ThrottleWriteBpsDevice)+
			len(b.ThrottleReadIOPSDevice)+len(b.ThrottleWriteIOPSDevice) > 0 {
			return unsupported("linux.resources.blockIO names devices of the host, which a virtual machine doesn't have")
		}
		r.BlockIO = nil
		drop("linux.resources.blockIO")
	}
	if len(r.Rdma) > 0 {
		return unsupported("linux.resources.rdma names devices of the host, which a virtual machine doesn't have")
	}
	// Kubernetes limits each of the host's sizes to 0.
	if i := slices.IndexFunc(r.HugepageLimits, func(l specs.LinuxHugepageLimit) bool { return l.Limit > 0 }); i >= 0 {
		return unsupported("linux.resources.hugepageLimits gives the container pages of %s, but the virtual machine has no huge pages",
			r.HugepageLimits[i].Pagesize)
	}
	r.HugepageLimits = nil
	if r.Network != nil {
		r.Network = nil
		drop("linux.resources.network")
	}
	if c := r.CPU; c != nil {
		if c.Cpus != "" || c.Mems != "" {
			c.Cpus, c.Mems = "", ""
			drop("linux.resources.cpu.cpus and mems")
		}
		c.RealtimePeriod, c.RealtimeRuntime = nil, nil
		quota(c)
	}
	if m := r.Memory; m != nil {
		//lint:ignore SA1019 callers still set it, and crun refuses it
		m.Kernel = nil
		m.KernelTCP, m.Swappiness, m.DisableOOMKiller = nil, nil, nil
		if m.Limit != nil && *m.Limit == 0 { // runc's word for none; others take it literally
			m.Limit = nil
		}
	}
	return nil
}

// quota makes the quota and its period complete, or leaves both out: crun takes a period alone for the end of a quota,
// and doesn't see that end without a period.
func quota(c *specs.LinuxCPU) {
	switch {
	case c.Quota == nil || *c.Quota == 0:
		c.Quota, c.Period = nil, nil
	case c.Period == nil || *c.Period == 0:
		period := uint64(defaultPeriod)
		c.Period = &period
	}
}
