package base

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
)

// minMemoryMiB is the ladder's lowest rung: the guest's own kernel, agent and crun take about 90 of it.
const minMemoryMiB = 128

// limits are the most that a container may ask for.
func limits(cfg *config.Config) (vmm.Shape, error) {
	max := vmm.Shape{VCPUs: cfg.VM.MaxVCPUs, MemoryMiB: int(cfg.VM.MaxMemory / units.MiB)}
	if max.VCPUs == 0 {
		max.VCPUs = runtime.NumCPU()
	}
	if max.MemoryMiB == 0 {
		var err error
		if max.MemoryMiB, err = hostMemoryMiB("/proc/meminfo"); err != nil {
			return max, err
		}
	}
	return max, nil
}

func hostMemoryMiB(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for _, l := range strings.Split(string(b), "\n") {
		if f := strings.Fields(l); len(f) >= 2 && f[0] == "MemTotal:" {
			kib, err := strconv.Atoi(f[1])
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("%s has no MemTotal", path)
}

// rung rounds a request up to the ladder of shapes: powers of two, and the limits themselves as the last rungs.
func rung(asked, max vmm.Shape) (vmm.Shape, error) {
	switch {
	case asked.VCPUs < 1 || asked.VCPUs > max.VCPUs:
		return vmm.Shape{}, &vmm.LimitError{What: "vCPUs", Asked: asked.VCPUs, Min: 1, Max: max.VCPUs}
	case asked.MemoryMiB < 1 || asked.MemoryMiB > max.MemoryMiB:
		return vmm.Shape{}, &vmm.LimitError{What: "MiB of memory", Asked: asked.MemoryMiB, Min: minMemoryMiB, Max: max.MemoryMiB}
	}
	s := vmm.Shape{VCPUs: 1, MemoryMiB: minMemoryMiB}
	for s.VCPUs < asked.VCPUs {
		s.VCPUs *= 2
	}
	for s.MemoryMiB < asked.MemoryMiB {
		s.MemoryMiB *= 2
	}
	return vmm.Shape{VCPUs: min(s.VCPUs, max.VCPUs), MemoryMiB: min(s.MemoryMiB, max.MemoryMiB)}, nil
}
