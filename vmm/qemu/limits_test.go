package qemu_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
	"github.com/cubesandbox/cube/vmm/record"
)

// groupValue reads a value of the machine's cgroup, whichever hierarchy has it.
func groupValue(t testing.TB, dir string, names ...string) int {
	t.Helper()
	return mustAtoi(t, groupText(t, dir, names...))
}

func groupText(t testing.TB, dir string, names ...string) string {
	t.Helper()
	held, err := record.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		for _, pattern := range []string{"/sys/fs/cgroup/cube/%s/%s", "/sys/fs/cgroup/*/cube/%s/%s"} {
			if found, _ := filepath.Glob(fmt.Sprintf(pattern, held.Cgroup, name)); len(found) > 0 {
				b, err := os.ReadFile(found[0])
				if err != nil {
					t.Fatal(err)
				}
				return strings.TrimSpace(string(b))
			}
		}
	}
	t.Fatalf("no %v in cgroup %s", names, held.Cgroup)
	return ""
}

// A guest that uses all of its memory stays within its group's limit: it ends by itself, and isn't killed, even where each page is
// the first of the file's, too.
func TestMemoryHog(t *testing.T) {
	cfg := testguest.Config(t)
	s := restoreSpec(t, cfg, "hog")
	m, g := start(t, cfg, s)
	hogged := 0
	for ; hogged < s.Shape.MemoryMiB; hogged += 10 {
		if _, err := g.Do(cfg, "hog 10"); err != nil {
			break
		}
	}
	// The kernel's own tool to end a guest that wants more than it has.
	if death := ended(t, m, cfg.Timeout(10*time.Second)); death.Reason != "guest panicked" {
		t.Errorf("got %+v", death)
	}
	used := groupValue(t, s.Dir, "memory.peak", "memory.max_usage_in_bytes") >> 20
	limit := groupValue(t, s.Dir, "memory.max", "memory.limit_in_bytes") >> 20
	t.Logf("%d MiB hogged, at most %d used, limit %d", hogged, used, limit)
	if hogged < s.Shape.MemoryMiB/2 || used < hogged || used >= limit {
		t.Error("that isn't all, or too much")
	}
}

// A guest that spins on more threads than it may use gets its CPU time and no more.
func TestSpinner(t *testing.T) {
	cfg := testguest.Config(t)
	s := restoreSpec(t, cfg, "spin")
	s.CPULimit = 0.5
	m, g := start(t, cfg, s)
	g.Must(t, cfg, "spin 4")
	const window = 3 * time.Second
	before := cpuTime(t, m)
	time.Sleep(window)
	used := cpuTime(t, m) - before
	t.Logf("%.2f CPUs used", used.Seconds()/window.Seconds())
	if share := used.Seconds() / window.Seconds(); share > 0.5*1.2 {
		t.Errorf("%.2f CPUs used, limit 0.5", share)
	}
	g.Must(t, cfg, "ping")
}

func TestSetCPULimit(t *testing.T) {
	cfg := testguest.Config(t)
	s := restoreSpec(t, cfg, "limit")
	s.CPULimit = 64 // more than it has vCPUs
	m, _ := start(t, cfg, s)
	ctx := within(t, cfg.Timeout(time.Second))
	whole := s.Shape.VCPUs * 100000
	for _, c := range []struct {
		set   func() error
		quota int
	}{
		{func() error { return nil }, whole},
		{func() error { return m.SetCPULimit(ctx, 0.5) }, 50000},
		{func() error { return m.SetCPULimit(ctx, 0) }, whole},
		{func() error { return m.SetCPULimit(ctx, 64) }, whole},
	} {
		if err := c.set(); err != nil {
			t.Fatal(err)
		}
		quota, _, _ := strings.Cut(groupText(t, s.Dir, "cpu.max", "cpu.cfs_quota_us"), " ")
		if quota != strconv.Itoa(c.quota) {
			t.Errorf("quota %s, want %d", quota, c.quota)
		}
	}
}

// cpuTime is what a machine's process has used.
func cpuTime(t testing.TB, m *qemu.Machine) time.Duration {
	t.Helper()
	stat := read(t, fmt.Sprintf("/proc/%d/stat", m.PID()))
	f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+2:])
	const tick = 10 * time.Millisecond // USER_HZ is 100 on all of Linux's architectures that matter here
	return time.Duration(mustAtoi(t, f[11])+mustAtoi(t, f[12])) * tick
}

// TestFootprint shows what an idle machine costs. The figures are for docs and for the overhead in limits.
func TestFootprint(t *testing.T) {
	cfg := testguest.Config(t)
	s := restoreSpec(t, cfg, "idle")
	m, g := start(t, cfg, s)
	g.Must(t, cfg, "ping")
	sizes := map[string]int{}
	for _, l := range strings.Split(read(t, fmt.Sprintf("/proc/%d/smaps_rollup", m.PID())), "\n")[1:] {
		if f := strings.Fields(l); len(f) == 3 {
			sizes[f[0]] = mustAtoi(t, f[1])
		}
	}
	t.Logf("throttled: %s", strings.ReplaceAll(groupText(t, s.Dir, "cpu.stat"), "\n", ", "))
	private := (sizes["Private_Clean:"] + sizes["Private_Dirty:"]) >> 10
	t.Logf("private %d MiB, PSS %d MiB, RSS %d MiB, cgroup %d MiB, threads %s", private, sizes["Pss:"]>>10, sizes["Rss:"]>>10,
		groupValue(t, s.Dir, "memory.current", "memory.usage_in_bytes")>>20, status(t, m.PID())["Threads"])
	if private > 80 {
		t.Errorf("an idle machine has %d MiB of its own", private)
	}
}

// TestLargerThanHost maps more memory for a guest than the host has.
func TestLargerThanHost(t *testing.T) {
	if mode, err := os.ReadFile("/proc/sys/vm/overcommit_memory"); err != nil || mode[0] == '2' {
		t.Skipf("vm.overcommit_memory is %s (%v): the host gives no memory that it may not have", mode, err)
	}
	cfg := testguest.Config(t)
	var host unix.Sysinfo_t
	if err := unix.Sysinfo(&host); err != nil {
		t.Fatal(err)
	}
	s := bootSpec(t, cfg, "large")
	s.Shape.MemoryMiB = int((host.Totalram+host.Totalswap)*uint64(host.Unit)>>20) + 1024
	size := int64(s.Shape.MemoryMiB) << 20
	empty, err := memory.Scratch(size)
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Close()
	s.Share = false
	if s.Memory, err = memory.SealKnown(empty, size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Memory.Close() })
	m, err := qemu.NewDriver(cfg, slog.Default()).Start(within(t, cfg.Timeout(60*time.Second)), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(gone()); err != nil {
		t.Error(err)
	}
}
