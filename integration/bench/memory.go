package main

import (
	"fmt"

	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/process"
)

// memory measures what idle machines take: one alone, then idle of them.
func (b *bench) memory(idle int) error {
	fmt.Printf("\n### Memory of idle machines (1 vCPU, 256 MiB, one sleeping process)\n\n| machines | private MiB each | PSS MiB each | shim RSS MiB each |\n| --- | --- | --- | --- |\n")
	var ids []string
	defer func() {
		for _, id := range ids {
			b.remove(id)
		}
	}()
	for i := range idle {
		id := b.id("idle", i)
		ids = append(ids, id)
		if r := b.Ctr("run", "-d", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, id, "sleep", "10000"); r.Err != nil {
			return r.Err
		}
		if n := i + 1; n == 1 || n == idle {
			if err := b.memoryRow(n); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) memoryRow(n int) error {
	var private, pss, shim uint64
	qemus, shims := b.Processes("qemu-system"), b.Processes("containerd-shim-cube-v2")
	if len(qemus) != n || len(shims) != n {
		return fmt.Errorf("%d QEMUs and %d shims for %d containers", len(qemus), len(shims), n)
	}
	for _, p := range qemus {
		m, err := process.MemoryOf(p.PID)
		if err != nil {
			return err
		}
		private += m.Private
		pss += m.PSS
	}
	for _, p := range shims {
		m, err := process.MemoryOf(p.PID)
		if err != nil {
			return err
		}
		shim += m.Resident
	}
	each := func(bytes uint64) float64 { return float64(bytes) / units.MiB / float64(n) }
	fmt.Printf("| %d | %.1f | %.1f | %.1f |\n", n, each(private), each(pss), each(shim))
	return nil
}
