package daemon

import (
	"testing"
	"time"

	"github.com/cubesandbox/cube/bpf"
)

// TestMemory: the last drops of each sandbox are kept, the latest life's of an id, and of so many sandboxes.
func TestMemory(t *testing.T) {
	var d drops
	now := time.Now()
	add := func(id bpf.ID, epoch uint32, length int) {
		now = now.Add(time.Second)
		d.add(bpf.Event{Sandbox: id, Epoch: epoch, Length: length, Reason: bpf.Policy}, now)
	}
	lengths := func(id bpf.ID, epoch uint32) (out []int) {
		for _, e := range d.list(id, epoch) {
			out = append(out, e.Length)
		}
		return out
	}
	add(0, 0, 1) // nobody's
	if len(d.of) > 0 {
		t.Error("a drop of no sandbox is kept")
	}
	for i := range maxDrops + 3 {
		add(1, 5, i)
	}
	if got := lengths(1, 5); len(got) != maxDrops || got[0] != 3 || got[maxDrops-1] != maxDrops+2 {
		t.Errorf("kept %v", got)
	}
	add(1, 6, 100)
	add(1, 5, 101) // late
	if got := lengths(1, 6); len(got) != 1 || got[0] != 100 {
		t.Errorf("the next one with the id has %v", got)
	}
	if got := lengths(1, 5); len(got) > 0 {
		t.Errorf("the one before has %v", got)
	}
	for id := bpf.ID(2); id <= maxOf+1; id++ {
		if id == maxOf+1 {
			add(1, 6, 102)
		}
		add(id, 7, 1)
	}
	if len(d.of) != maxOf || len(lengths(2, 7)) > 0 || len(lengths(1, 6)) != 2 || len(lengths(maxOf+1, 7)) != 1 {
		t.Errorf("of %d sandboxes, %v of the one that is silent, %v of another", len(d.of), lengths(2, 7), lengths(1, 6))
	}
	if testing.AllocsPerRun(10, func() { d.add(bpf.Event{Sandbox: 1, Epoch: 6, Reason: bpf.Policy}, now) }) > 0 {
		t.Error("a further drop takes memory")
	}
}
