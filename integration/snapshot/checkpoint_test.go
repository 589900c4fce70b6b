package snapshot

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/shim/saved"
)

// TestCheckpoint: a container's memory and files go on from a checkpoint, in its own place and in clones, each for itself.
func TestCheckpoint(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "parent").run(ctx, "")
	b.counts(1)
	b.counts(2)
	dir := b.checkpoint(ctx, client)
	b.counts(3)
	b.end(ctx)

	b.run(ctx, dir)
	b.counts(3)
	clone := newBox(t, client, ctx, "clone").run(ctx, dir)
	clone.counts(3)
	clone.counts(4)
	clone.counts(5)
	b.counts(4)
	if got := clone.exec(ctx, "wc", "-l", "/lines"); got != "5 /lines" {
		t.Errorf("exec in the clone says %q", got)
	}
	b.end(ctx)
	// What reads to the end of its input ends by itself.
	must(t, clone.in.Close())
	must(t, clone.task.CloseIO(ctx, containerd.WithStdinCloser))
	if status := <-clone.ends; status.ExitCode() != 3 {
		t.Errorf("the clone ended with %v", status)
	}
	_, err := clone.task.Delete(ctx)
	must(t, err)
	clone.task = nil
}

// TestCtr: containerd's tool makes a checkpoint, too. After that it fails, as with each runtime but runc: it goes on to
// export the container's files by itself, which the host must not read.
func TestCtr(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "ctr").run(ctx, "")
	b.counts(1)
	dir := filepath.Join(t.TempDir(), "checkpoint")
	r := s.Ctr("task", "checkpoint", "--image-path", dir, b.id)
	if c, err := saved.ReadCheckpoint(dir); err != nil || c.Container != b.id {
		t.Errorf("checkpoint %+v, %v", c, err)
	}
	if r.Err == nil || !strings.Contains(r.Stderr, "the host must not mount") {
		t.Errorf("ctr: %+v", r)
	}
	b.counts(2)
	b.end(ctx)
	b.run(ctx, dir)
	b.counts(2)
	b.end(ctx)
}

// TestRollback: memory and disk go back, several times, and the task stays.
func TestRollback(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "back").run(ctx, "")
	b.counts(1)
	shim := b.shim(ctx)
	name, err := shim.Save(ctx, "", "")
	must(t, err)
	b.counts(2)
	b.counts(3)
	for range 2 {
		pid, err := shim.Rollback(ctx, name)
		must(t, err)
		if got := s.PID(t, b.id); got != pid {
			t.Errorf("the task has pid %d, the machine %d", got, pid)
		}
		b.counts(2)
		if got := b.exec(ctx, "wc", "-l", "/lines"); got != "2 /lines" {
			t.Errorf("exec says %q", got)
		}
	}
	// One that fails leaves the machine as it is.
	if _, err := shim.Rollback(ctx, "none"); err == nil {
		t.Error("rolled back to nothing")
	}
	b.counts(3)
	if _, err := st.Delete(name); err != nil {
		t.Error(err)
	}
	b.counts(4) // on a snapshot that is gone
	b.end(ctx)
}

// TestKilledShim: a shim that is killed while it saves leaves the snapshot whole or not at all, and no machine.
func TestKilledShim(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	for _, at := range []string{".tmp-", "memory", "snapshot.json", "published"} {
		b := newBox(t, client, ctx, "killed-"+strings.Trim(at, ".-")).run(ctx, "")
		b.counts(1)
		shim, name := b.shim(ctx), b.id
		w := watch(t, s.Config.SnapshotDir())
		done := make(chan error, 1)
		go func() {
			_, err := shim.Save(ctx, name, "")
			done <- err
		}()
		switch tmp := w.await(".tmp-"); at {
		case ".tmp-":
		case "published":
			w.await(name)
		default:
			watch(t, filepath.Join(s.Config.SnapshotDir(), tmp)).await(at)
		}
		b.killShim()
		err := <-done
		<-b.ends // containerd ends what is left
		must(t, st.Sweep())
		_, found := st.Inspect(name)
		t.Logf("killed at %s: save %v, snapshot %v", at, err, found)
		if (found == nil) != (at == "published") && at != "snapshot.json" || found != nil && !errdefs.IsNotFound(found) {
			t.Errorf("killed at %s: the snapshot: %v", at, found)
		}
	}
}

// TestClonesDiverge: what is of the host is each machine's own.
func TestClonesDiverge(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "origin").run(ctx, "")
	dir := b.checkpoint(ctx, client)
	random := map[string]bool{}
	now := time.Now().Unix()
	for _, name := range []string{"one", "two"} {
		clone := newBox(t, client, ctx, name).run(ctx, dir)
		clone.counts(1)
		out := strings.Fields(clone.exec(ctx, "sh", "-c", "date +%s; od -An -N8 -tx8 /dev/urandom"))
		if len(out) != 2 || random[out[1]] {
			t.Errorf("%s says %q, after %v", name, out, random)
			continue
		}
		random[out[1]] = true
		if at, err := strconv.ParseInt(out[0], 10, 64); err != nil || at < now-2 || at > time.Now().Unix()+2 {
			t.Errorf("%s takes the time for %s", name, out[0])
		}
		clone.end(ctx)
	}
	b.counts(1)
	b.end(ctx)
}
