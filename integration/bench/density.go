package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/internal/process"
)

// density measures what idle clones of one container take: of memory by three measures, and of the disk.
func (b *bench) density(clones int) error {
	parent := b.id("parent", 0)
	if err := b.idle(parent, small); err != nil {
		return err
	}
	fmt.Printf("\n### What idle clones take (1 vCPU, 256 MiB, one sleeping process; MiB each)\n\n" +
		"Own: anonymous pages, which include what the guest has written of its memory. PSS: with its share of what others have, too. " +
		"Host: by how much MemAvailable of the whole host went down, shims, containerd's and the kernel's part, and the one copy of the saved memory included. Disk: what the store's file system has less, the snapshot included that the clones keep.\n\n" +
		"| clones | own | PSS | shim RSS | host | disk |\n| --- | --- | --- | --- | --- | --- |\n")
	before, err := available()
	if err != nil {
		return err
	}
	usedBefore, err := b.used()
	if err != nil {
		return err
	}
	var ids []string
	for _, n := range []int{1, 10, 50} {
		n = min(n, clones)
		for len(ids) < n {
			more, _, err := b.must("clone", "-n", strconv.Itoa(min(n-len(ids), 10)), parent)
			if err != nil {
				return err
			}
			ids = append(ids, strings.Fields(more)...)
		}
		if err := b.densityRow(ids, before, usedBefore); err != nil {
			return err
		}
		if n == clones {
			break
		}
	}
	for len(ids) > 0 { // in parts, for the sake of the command's deadline
		some := ids[:min(len(ids), 10)]
		if err := b.discard(some...); err != nil {
			return err
		}
		ids = ids[len(some):]
	}
	return b.discard(parent)
}

func (b *bench) densityRow(ids []string, before, usedBefore int64) error {
	pids, err := b.pids()
	if err != nil {
		return err
	}
	var own, pss, shim uint64
	for _, id := range ids {
		m, err := process.MemoryOf(pids[id])
		if err != nil {
			return fmt.Errorf("clone %s: %w", id, err)
		}
		own += m.Anonymous
		pss += m.PSS
	}
	shims := b.Processes("containerd-shim-cube-v2")
	for _, p := range shims {
		m, err := process.MemoryOf(p.PID)
		if err != nil {
			return err
		}
		shim += m.Resident
	}
	now, err := available()
	if err != nil {
		return err
	}
	used, err := b.used()
	if err != nil {
		return err
	}
	n := float64(len(ids))
	const kib = 1024.0
	fmt.Printf("| %d | %.1f | %.1f | %.1f | %.1f | %.2f |\n", len(ids), float64(own)/units.MiB/n, float64(pss)/units.MiB/n, float64(shim)/units.MiB/float64(len(shims)),
		float64(before-now)/kib/n, float64(used-usedBefore)/kib/kib/n)
	return nil
}

// pids are those of all QEMUs, by container.
func (b *bench) pids() (map[string]int, error) {
	r := b.Ctr("task", "ls")
	if r.Err != nil {
		return nil, r.Err
	}
	pids := map[string]int{}
	for line := range strings.Lines(r.Stdout) {
		if f := strings.Fields(line); len(f) >= 2 {
			pids[f[0]], _ = strconv.Atoi(f[1]) // the heading has none
		}
	}
	return pids, nil
}

// available is how much memory the host could still give, in KiB.
func available() (int64, error) { return meminfo("MemAvailable") }

// meminfo is a value of /proc/meminfo, in KiB.
func meminfo(name string) (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == name+":" {
			return strconv.ParseInt(f[1], 10, 64)
		}
	}
	return 0, fmt.Errorf("/proc/meminfo has no %s", name)
}
