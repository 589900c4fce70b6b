package snapshot

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/cgroups/v3/cgroup2/stats"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/shim/saved"
)

// hog takes the machine's only processor for itself, at a real-time priority, for as many seconds as it reads: the agent
// doesn't get any of it meanwhile. Before, it leaves it some for what it says.
const hog = `i=0; while read n; do i=$((i+1)); echo x >>/lines; echo $i $(wc -l </lines)
	[ "$n" = line ] || { sleep 0.5; chrt -f 50 timeout $n chrt -f 40 sh -c 'while :; do :; done'; }; done`

// TestStalledAgent: a save of a machine whose agent gets no time is made nevertheless, after the agent's deadline. It is good
// to be put back to, and for nothing else.
func TestStalledAgent(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "stalled", oci.WithPrivileged, oci.WithProcessArgs("sh", "-c", "echo -1 >/proc/sys/kernel/sched_rt_runtime_us; "+hog)).run(ctx, "")
	b.counts(1)
	shim := b.shim(ctx)
	b.countsAt(fmt.Sprint(s.Config.Timeout(12*time.Second).Seconds()), 2)
	s.Eventually(t, 10*time.Second, "silence of the agent", func() bool {
		ctx, cancel := context.WithTimeout(ctx, s.Config.Timeout(1500*time.Millisecond))
		defer cancel()
		_, err := b.task.Metrics(ctx)
		return err != nil
	})
	began := time.Now()
	name, err := shim.Save(ctx, b.id, "")
	took := time.Since(began)
	must(t, err)
	t.Logf("saved in %v", took)
	if least := s.Config.Timeout(4 * time.Second); took < least || took > 6*least {
		t.Errorf("the save took %v", took)
	}
	if info, err := st.Inspect(name); err != nil || info.Frozen {
		t.Errorf("at rest: %v, %v", info.Frozen, err)
	}
	b.counts(3) // it goes on
	dir := t.TempDir()
	must(t, saved.Checkpoint{Snapshot: name, Container: b.id}.Write(dir))
	clone := newBox(t, client, ctx, "unrested")
	if err := clone.create(ctx, dir); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "not at rest") {
		t.Errorf("a clone: %v", err)
	}
	if _, err := shim.Rollback(ctx, name); err != nil {
		t.Fatal(err)
	}
	b.counts(3)
	b.end(ctx)
}

// TestLimitsStay: what a container was given after it was saved, it has after a rollback, too: in the guest and on the host.
func TestLimitsStay(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "limits").run(ctx, "")
	shim := b.shim(ctx)
	name, err := shim.Save(ctx, "", "")
	must(t, err)
	memory, quota, period := int64(64<<20), int64(50000), uint64(100000)
	must(t, b.task.Update(ctx, containerd.WithResources(&specs.LinuxResources{
		Memory: &specs.LinuxMemory{Limit: &memory}, CPU: &specs.LinuxCPU{Quota: &quota, Period: &period},
	})))
	before, machine := b.limits(ctx), b.machineLimit()
	_, err = shim.Rollback(ctx, name)
	must(t, err)
	if after := b.limits(ctx); after != before || !strings.Contains(after, "67108864") {
		t.Errorf("limits before: %s, and after: %s", before, after)
	}
	// Pages of the snapshot that it was restored from count twice once they are written, and its limit has room for those. One
	// snapshot has more of them than another, and none more than the guest has memory.
	if after := b.machineLimit(); min(machine, after) < guestMemory || max(machine, after)-min(machine, after) > guestMemory {
		t.Errorf("the machine's memory is limited to %d, and before to %d", after, machine)
	}

	// And a save doesn't hold up a kill for longer than the agent itself might.
	w, done := watch(t, s.Config.SnapshotDir()), make(chan error, 1)
	go func() {
		_, err := shim.Save(ctx, b.id, "")
		done <- err
	}()
	w.await(".tmp-")
	began := time.Now()
	must(t, b.task.Kill(ctx, syscall.SIGKILL))
	status := <-b.ends
	t.Logf("killed amid a save: after %v, the save: %v", time.Since(began), <-done)
	if limit := s.Config.Timeout(10 * time.Second); status.ExitCode() != 137 || time.Since(began) > limit {
		t.Errorf("it ended with %v after %v", status, time.Since(began))
	}
	_, err = b.task.Delete(ctx)
	must(t, err)
	b.task = nil
	b.nothingLeft()
}

// guestMemory is that of a guest whose size nobody has chosen.
const guestMemory = 256 << 20

// machineLimit is what memory the machine may use of the host's, in bytes.
func (b *box) machineLimit() int64 {
	b.Helper()
	files := stack.CgroupFiles(b.id, "memory.limit_in_bytes", "memory.max")
	if len(files) != 1 {
		b.Fatalf("control group's files: %q", files)
	}
	content, err := os.ReadFile(files[0])
	must(b, err)
	limit, err := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
	must(b, err)
	return limit
}

// limits are the memory that it may use, as the guest has it, and the processor time of its machine, as the host has it.
func (b *box) limits(ctx context.Context) string {
	b.Helper()
	m, err := b.task.Metrics(ctx)
	must(b, err)
	var metrics stats.Metrics
	must(b, typeurl.UnmarshalTo(m.Data, &metrics))
	files := stack.CgroupFiles(b.id, "cpu.cfs_quota_us", "cpu.max")
	text := []string{fmt.Sprint(metrics.Memory.GetUsageLimit())}
	for _, f := range files {
		content, err := os.ReadFile(f)
		must(b, err)
		text = append(text, strings.TrimSpace(string(content)))
	}
	if len(files) != 1 {
		b.Errorf("control group's files: %q", files)
	}
	return strings.Join(text, " ")
}
