package spec

import (
	"math"
	"runtime"
	"strconv"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

const (
	// guestOverheadMiB is what the guest's kernel and agent need beside a container that has a memory limit: 45 MiB
	// in use right after boot with Debian's kernel, and as much again for page tables, slabs and crun.
	guestOverheadMiB = 96
	// minMemoryMiB is the least a machine can boot with.
	minMemoryMiB = 128
)

// size decides the machine's shape: annotations, then the limits of the pod or the container, then the configuration.
func size(p *Plan, cfg *config.Config) error {
	l, err := p.limits()
	if err != nil {
		return err
	}
	vcpus, err := p.vcpus(cfg, l)
	if err != nil {
		return err
	}
	memory, err := p.memory(cfg, l)
	if err != nil {
		return err
	}
	p.Shape.VCPUs, p.Shape.MemoryMiB = vcpus, memory
	p.CPULimit = l.cpus
	return nil
}

// limits are what a pod or container may use, 0 for no limit.
type limits struct {
	cpus   float64
	memory int64 // bytes
}

// limits are the pod's, for the container that stands for one, else the container's.
func (p *Plan) limits() (l limits, err error) {
	if p.Sandbox {
		if l, err = sandboxLimits(p.Guest.Annotations); err != nil || l != (limits{}) {
			return l, err
		}
	}
	r := p.Guest.Linux.Resources
	if r == nil {
		return limits{}, nil
	}
	if r.CPU != nil && r.CPU.Quota != nil {
		l.cpus = cpus(*r.CPU.Quota, r.CPU.Period)
	}
	if r.Memory != nil && r.Memory.Limit != nil {
		l.memory = max(*r.Memory.Limit, 0)
	}
	return l, nil
}

// sandboxLimits are those that CRI adds up for a pod. Its CPU shares are a weight against other pods, no limit.
func sandboxLimits(annotations map[string]string) (l limits, err error) {
	number := func(key string) (n int64) {
		v, ok := annotations[key]
		if !ok || err != nil {
			return 0
		}
		if n, err = strconv.ParseInt(v, 10, 64); err != nil {
			err = invalid("annotation %s=%q must be a number", key, v)
		}
		return n
	}
	l.memory = max(number(sandboxMemory), 0)
	quota, period := number(sandboxQuota), uint64(max(number(sandboxPeriod), 0))
	l.cpus = cpus(quota, &period)
	return l, err
}

// defaultPeriod is the kernel's, in microseconds, for a quota that comes without.
const defaultPeriod = 100000

// cpus is a CPU quota in CPUs, 0 for none.
func cpus(quota int64, period *uint64) float64 {
	switch {
	case quota <= 0:
		return 0
	case period == nil || *period == 0:
		return float64(quota) / defaultPeriod
	}
	return float64(quota) / float64(*period)
}

func (p *Plan) vcpus(cfg *config.Config, l limits) (int, error) {
	most := cfg.VM.MaxVCPUs
	if most == 0 {
		most = runtime.NumCPU()
	}
	if v, ok := p.Guest.Annotations[VCPUs]; ok {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > most {
			return 0, invalid("annotation %s=%q must be a whole number from 1 to %d (vm.max_vcpus)", VCPUs, v, most)
		}
		return n, nil
	}
	if l.cpus > 0 {
		// A quota is a limit, not a demand: a container that may use more CPUs than there are gets those that are.
		return int(min(math.Ceil(l.cpus), float64(most))), nil
	}
	return min(cfg.VM.VCPUs, most), nil
}

func (p *Plan) memory(cfg *config.Config, l limits) (mib int, err error) {
	most := int64(cfg.VM.MaxMemory)
	if most == 0 {
		if most, err = hostMemory(); err != nil {
			return 0, err
		}
	}
	if v, ok := p.Guest.Annotations[Memory]; ok {
		n, err := units.RAMInBytes(v)
		if err != nil || n < minMemoryMiB*units.MiB || n > most {
			return 0, invalid("annotation %s=%q must be a size from %dMiB to %s (vm.max_memory), like 512MiB",
				Memory, v, minMemoryMiB, bytesSize(most))
		}
		return toMiB(n), nil
	}
	need := toMiB(int64(cfg.VM.Memory))
	if l.memory > 0 {
		if l.memory > most {
			return 0, invalid("memory limit %s is more than a machine may have: %s (vm.max_memory)", bytesSize(l.memory), bytesSize(most))
		}
		need = max(need, toMiB(l.memory)+guestOverheadMiB)
	}
	return need, nil
}

func toMiB(bytes int64) int { return int((bytes + units.MiB - 1) / units.MiB) }

func bytesSize(bytes int64) string { return units.BytesSize(float64(bytes)) }

func hostMemory() (int64, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, err
	}
	return int64(si.Totalram) * int64(si.Unit), nil
}
