package snapshot

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// fill leaves about that many bytes free in the store, and returns how to give the rest back.
func fill(t *testing.T, leave int64) (empty func()) {
	t.Helper()
	space.Settle(s.Config.StoreDir())
	r, err := space.Of(s.Config.StoreDir())
	must(t, err)
	path := filepath.Join(s.Config.StoreDir(), "ballast")
	f, err := os.Create(path)
	must(t, err)
	empty = func() {
		_ = f.Truncate(0) // counts at once
		_ = f.Close()
		_ = os.Remove(path)
	}
	t.Cleanup(empty)
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, r.Free-leave))
	return empty
}

func waits(t *testing.T, id string) bool {
	t.Helper()
	var list []sandbox.Container
	must(t, json.Unmarshal([]byte(cube(t, "ps", "--json")), &list))
	for _, k := range list {
		if k.ID == id {
			return k.StoreFull
		}
	}
	t.Fatalf("%s doesn't run: %+v", id, list)
	return false
}

// TestWatermark: in a store above its watermark nothing is made, whoever asks, and each says why and what to do; what runs goes
// on, and can be put back.
func TestWatermark(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "runs").run(ctx, "")
	b.counts(1)
	name, err := b.shim(ctx).Save(ctx, "", "")
	must(t, err)
	made := newBox(t, client, ctx, "made") // its disk is there, but no task
	r, err := space.Of(s.Config.StoreDir())
	must(t, err)
	empty := fill(t, r.Size/100*3)
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "store.high_watermark") || !strings.Contains(err.Error(), "cube prune") {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = b.shim(ctx).Save(ctx, "", "")
	refused("save", err)
	refused("create", made.create(ctx, ""))
	made.task = nil
	_, err = client.SnapshotService("cube").Prepare(ctx, s.ID(t, "disk"), "")
	refused("prepare", err)
	for _, args := range [][]string{{"run", "--rm", stack.Image, "true"}, {"clone", b.id}, {"snapshot", "create", b.id}} {
		if r := s.Cube(args...); r.Err == nil || strings.Count(r.Stderr, "\n") != 1 {
			t.Errorf("cube %s: %+v", strings.Join(args, " "), r)
		}
	}
	b.counts(2)
	must(t, func() error { _, err := b.shim(ctx).Rollback(ctx, name); return err }())
	b.counts(2)
	if all, err := st.List(); err != nil || len(all) != 1 {
		t.Errorf("snapshots: %+v, %v", all, err)
	}
	empty()
	made.run(ctx, "").counts(1)
}

// TestFullStore: a container that writes to a full store stands still, which a user sees, and goes on when there is space; what
// it has written is all there.
func TestFullStore(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "writer").run(ctx, "")
	b.counts(1)
	empty := fill(t, 8<<20)
	written := make(chan string, 1)
	go func() {
		r := s.Cube("exec", b.id, "sh", "-c", "dd if=/dev/zero of=/big bs=1M count=64 conv=fsync 2>/dev/null && wc -c </big")
		written <- strings.TrimSpace(r.Stdout) + r.Stderr
	}()
	s.Eventually(t, 60*time.Second, "the container to stand still", func() bool { return waits(t, b.id) })
	if out := cube(t, "ps"); !strings.Contains(out, "the store is full") {
		t.Errorf("ps: %s", out)
	}
	select {
	case out := <-written:
		t.Errorf("64 MiB went into 8: %s", out)
	default:
	}
	empty()
	select {
	case out := <-written:
		if out != "67108864" {
			t.Errorf("written: %q", out)
		}
	case <-time.After(s.Config.Timeout(2 * time.Minute)):
		t.Fatal("it doesn't go on")
	}
	s.Eventually(t, 20*time.Second, "it to be known that the container goes on", func() bool { return !waits(t, b.id) })
	b.counts(2)
}
