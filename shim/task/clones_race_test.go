package task

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/shim/saved"
)

// TestClonesAtOnce: snapshots are put back to and deleted, and others made, while clones are made of them. A clone is there and
// whole, or its snapshot was gone.
func TestClonesAtOnce(t *testing.T) {
	h := newHarness(t)
	t.Setenv("CUBE_TIMEOUT_SCALE", "1") // nothing is to be too late
	h.run("sleep")
	var made, late atomic.Int32
	var makers sync.WaitGroup
	for _, name := range []string{"one", "two"} {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		h.must(saved.Checkpoint{Snapshot: name, Container: cid}.Write(dir))
		makers.Go(func() {
			for round := range 10 {
				if _, err := h.pod.Save(t.Context(), name, ""); err != nil {
					t.Errorf("save %s: %v", name, err)
					return
				}
				var users sync.WaitGroup
				for n := range 3 {
					id := fmt.Sprint(name, "-", round, "-", n)
					pod := h.clone(id)
					users.Go(func() {
						switch err := h.lives(pod, id, dir); {
						case err == nil:
							made.Add(1)
						case errdefs.IsNotFound(errgrpc.ToNative(err)):
							late.Add(1)
						default:
							t.Errorf("%s: %v", id, err)
						}
					})
				}
				if _, err := h.pod.Rollback(t.Context(), name); err != nil && !refusedAs(err) {
					t.Errorf("roll back to %s: %v", name, err)
				}
				if _, err := h.store().Delete(name); err != nil {
					t.Errorf("delete %s: %v", name, err)
				}
				users.Wait()
			}
		})
	}
	makers.Wait()
	t.Logf("%d clones; %d came too late", made.Load(), late.Load())
	if made.Load() == 0 || len(h.alive()) != 1 {
		t.Errorf("%d clones were made, %d machines live", made.Load(), len(h.alive()))
	}
}

// lives is the whole life of a clone, in a pod of its own.
func (h *harness) lives(pod *Service, id, checkpoint string) error {
	ctx := context.Background()
	r := h.createRequest()
	r.ID, r.Checkpoint, r.Bundle = id, checkpoint, filepath.Join(h.dir, "bundles", id)
	if err := os.MkdirAll(filepath.Join(r.Bundle, "rootfs"), 0o700); err != nil {
		return err
	}
	if err := os.Link(filepath.Join(h.bundle, "config.json"), filepath.Join(r.Bundle, "config.json")); err != nil {
		return err
	}
	if _, err := pod.Create(ctx, r); err != nil {
		return err
	}
	// From here on nothing is missing: the errors are those of no type.
	if _, err := pod.Start(ctx, &taskapi.StartRequest{ID: id}); err != nil {
		return fmt.Errorf("start: %v", err)
	}
	if _, err := pod.Kill(ctx, &taskapi.KillRequest{ID: id, Signal: uint32(syscall.SIGKILL)}); err != nil {
		return fmt.Errorf("kill: %v", err)
	}
	if w, err := pod.Wait(ctx, &taskapi.WaitRequest{ID: id}); err != nil || w.ExitStatus != 137 {
		return fmt.Errorf("wait: %v, %v", w, err)
	}
	if _, err := pod.Delete(ctx, &taskapi.DeleteRequest{ID: id}); err != nil {
		return fmt.Errorf("delete: %v", err)
	}
	return nil
}
