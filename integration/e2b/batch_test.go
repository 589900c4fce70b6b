package e2b

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/orchestrator/bench"
	api "github.com/cubesandbox/cube/orchestrator/client"
)

// TestBatch runs a command in many sandboxes, as somebody with a key does: each item is told what it is for, each has one result, and
// nothing is left of any.
func TestBatch(t *testing.T) {
	n, timeout := 5, "20s" // which is what an item that has no end takes
	if long() {
		n, timeout = 200, "90s"
	}
	o := newOutsider(t)
	before := footprint(t)
	reserved := o.metric(memoryReserved, "memory")
	measured := map[string]float64{}
	for _, status := range []string{"ok", "failed", "timeout", "refused"} {
		measured[status] = o.metric("cube_batch_items_total", status)
	}
	var items strings.Builder
	for i := range n {
		fmt.Fprintf(&items, "{\"N\": \"%d\"}\n", i)
	}
	const command = `case $N in 1) echo why >&2; exit 7;; 2) head -c 200000 /dev/zero | tr '\0' x; echo end;; 3) exec sleep 3600;; *) echo $N in $E2B_SANDBOX_ID of $ALL;; esac`
	c := o.command(o.cube, "batch", "--template", "base", "--env-file", "-", "-e", "ALL=all", "--timeout", timeout, "--concurrency", "6", "--json", "--", command)
	var told strings.Builder
	c.Stdin, c.Stderr = strings.NewReader(items.String()), &told
	out, err := c.Output() // which takes as long as it takes
	if code := c.ProcessState.ExitCode(); code != 1 {
		t.Errorf("%d, %v", code, err)
	}
	results, boxes := map[int]api.BatchResult{}, map[string]bool{}
	for line := range strings.Lines(string(out)) {
		var one api.BatchResult
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if _, twice := results[one.Index]; twice || boxes[one.SandboxID] {
			t.Errorf("twice: %+v", one)
		}
		results[one.Index], boxes[one.SandboxID] = one, true
	}
	for i := range n {
		one := results[i]
		status, says := "ok", fmt.Sprintf("%d in %s of all\n", i, one.SandboxID)
		switch i {
		case 1:
			status, says = "failed", ""
			if one.ExitCode == nil || *one.ExitCode != 7 || one.Stderr != "why\n" {
				t.Errorf("%+v", one)
			}
		case 2:
			says = strings.Repeat("x", 64<<10-4) + "end\n"
			if one.StdoutOmitted != 200_004-64<<10 {
				t.Errorf("%d bytes are left out", one.StdoutOmitted)
			}
		case 3:
			status, says = "timeout", ""
		}
		if one.Status != status || one.Stdout != says {
			t.Errorf("item %d: %s %q %.100q", i, one.Status, one.Error, one.Stdout)
		}
	}
	if len(results) != n {
		t.Errorf("%d results", len(results))
	}
	t.Log(strings.TrimSpace(told.String()))
	for status, want := range map[string]int{"ok": n - 2, "failed": 1, "timeout": 1, "refused": 0} {
		if got := o.metric("cube_batch_items_total", status) - measured[status]; got != float64(want) {
			t.Errorf("%.0f items are %s by the metrics, not %d", got, status, want)
		}
	}
	asBefore(t, before)
	o.idle(reserved)
}

const memoryReserved = "cube_admission_reserved"

// idle sees that no batch is under way, and that no more is reserved than those bytes.
func (o *outsider) idle(reserved float64) {
	o.Helper()
	var odd string
	defer func() {
		if o.Failed() {
			o.Log(odd)
		}
	}()
	s.Eventually(o, time.Minute, "no batch", func() bool {
		odd = ""
		for name, want := range map[string]float64{"cube_batches_running": 0, "cube_batch_sandboxes": 0} {
			if got := o.metric(name, ""); got != want {
				odd += fmt.Sprintf("%s is %.0f ", name, got)
			}
		}
		if got := o.metric(memoryReserved, "memory"); got != reserved {
			odd += fmt.Sprintf("%.0f bytes are reserved, before it was %.0f", got, reserved)
		}
		return odd == ""
	})
}

// TestBatchEnds has a batch end before it is through: its client goes, or cube is killed. Nothing is left of it, and what isn't of it
// goes on.
func TestBatchEnds(t *testing.T) {
	n, most := 6, 3
	if long() {
		n, most = 200, 8
	}
	o := newOutsider(t)
	before := footprint(t)
	reserved := o.metric(memoryReserved, "memory")
	for _, how := range []string{"client", "cube"} {
		t.Run(how, func(t *testing.T) {
			o := o.with(t)
			other := o.create(nil)
			c := o.command(o.cube, "batch", "--template", "base", "--count", fmt.Sprint(n), "--concurrency", fmt.Sprint(most), "--", "case $RANDOM in *[0-4]) sleep 1;; *) sleep 3600;; esac")
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			s.Eventually(t, 2*time.Minute, "sandboxes of the batch", func() bool { return len(o.list()) > 2 })
			if how == "client" {
				_ = c.Process.Kill()
			} else {
				cube := victims(false)[0]
				cube.dies(t)
				cube.returns(t)
				o.serves()
			}
			_ = c.Wait()
			s.Eventually(t, time.Minute, "the end of the batch's sandboxes", func() bool { return len(o.list()) == 1 })
			o.says(other, "echo here", "here")
			o.killAll()
			asBefore(t, before)
			o.idle(reserved)
		})
	}
}

// TestBenchCommand measures the stack as somebody with a key does, and leaves nothing.
func TestBenchCommand(t *testing.T) {
	o := newOutsider(t)
	before := footprint(t)
	var rep bench.Report
	if err := json.Unmarshal([]byte(o.runs(o.cube, "bench", "-n", "2", "-c", "2", "--json")), &rep); err != nil {
		t.Fatal(err)
	}
	names := ""
	for _, r := range rep.Rows {
		names += r.Operation + " "
		if r.Failed != 0 || r.Operation != "kill" && r.Count != 2 {
			t.Errorf("%+v", r)
		}
		t.Logf("%s: p50 %.0f ms, the longest %.0f ms", r.Operation, r.P50, r.Max)
	}
	if names != "create kill exec snapshot fork pause resume " {
		t.Errorf("measured: %s", names)
	}
	if list := o.runs(o.cube, "ps", "-q"); list != "" {
		t.Errorf("left: %s", list)
	}
	asBefore(t, before)
}
