package spec

import (
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// The annotations of this runtime. Whatever else begins with the prefix is a mistake, and said so.
const (
	annotationPrefix = "io.cube."
	// VCPUs is the number of virtual CPUs, a whole number.
	VCPUs = annotationPrefix + "vcpus"
	// Memory is the machine's memory, like "512MiB" or a number of bytes.
	Memory = annotationPrefix + "memory"
)

// criContainerType marks the containers of a Kubernetes pod.
const criContainerType = "io.kubernetes.cri.container-type"

const (
	// guestOverheadMiB is what the guest's kernel and agent need beside a container that has a memory limit: 45 MiB
	// in use right after boot with Debian's kernel, and as much again for page tables, slabs and crun.
	guestOverheadMiB = 96
	// minMemoryMiB is the least a machine can boot with.
	minMemoryMiB = 128
)

func annotations(p *Plan, _ *config.Config) error {
	known := []string{Memory, VCPUs}
	for key := range p.Guest.Annotations {
		if strings.HasPrefix(key, annotationPrefix) && !slices.Contains(known, key) {
			return invalid("unknown annotation %s; known are %s", key, strings.Join(known, ", "))
		}
	}
	if t, ok := p.Guest.Annotations[criContainerType]; ok {
		return unsupported("annotation %s=%s: Kubernetes pods are not supported by this version", criContainerType, t)
	}
	return nil
}

// size decides the machine's shape: annotations, then the container's limits, then the configuration.
func size(p *Plan, cfg *config.Config) error {
	vcpus, err := p.vcpus(cfg)
	if err != nil {
		return err
	}
	memory, err := p.memory(cfg)
	if err != nil {
		return err
	}
	p.Shape.VCPUs, p.Shape.MemoryMiB = vcpus, memory
	p.CPULimit = p.cpuLimit()
	return nil
}

// cpuLimit is the container's CPU quota in CPUs, 0 for none.
func (p *Plan) cpuLimit() float64 {
	r := p.Guest.Linux.Resources
	if r == nil || r.CPU == nil || r.CPU.Quota == nil || r.CPU.Period == nil || *r.CPU.Quota <= 0 || *r.CPU.Period == 0 {
		return 0
	}
	return float64(*r.CPU.Quota) / float64(*r.CPU.Period)
}

func (p *Plan) vcpus(cfg *config.Config) (int, error) {
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
	if limit := p.cpuLimit(); limit > 0 {
		// A quota is a limit, not a demand: a container that may use more CPUs than there are gets those that are.
		return int(min(math.Ceil(limit), float64(most))), nil
	}
	return min(cfg.VM.VCPUs, most), nil
}

func (p *Plan) memory(cfg *config.Config) (mib int, err error) {
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
				Memory, v, minMemoryMiB, units.BytesSize(float64(most)))
		}
		return toMiB(n), nil
	}
	need := toMiB(int64(cfg.VM.Memory))
	if r := p.Guest.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil && *r.Memory.Limit > 0 {
		limit := *r.Memory.Limit
		if limit > most {
			return 0, invalid("memory limit %s is more than a machine may have: %s (vm.max_memory)",
				units.BytesSize(float64(limit)), units.BytesSize(float64(most)))
		}
		need = max(need, toMiB(limit)+guestOverheadMiB)
	}
	return need, nil
}

func toMiB(bytes int64) int { return int((bytes + units.MiB - 1) / units.MiB) }

func hostMemory() (int64, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, err
	}
	return int64(si.Totalram) * int64(si.Unit), nil
}
