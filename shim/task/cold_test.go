package task

import (
	"strings"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
)

// TestUnfitCheckpoint: a checkpoint that isn't of a pause is not started cold when its machine can't be restored here.
func TestUnfitCheckpoint(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	dir := c.checkpoint()
	c.end()
	before := len(h.launcher.All())
	h.launcher.Unfit = errdefs.ErrFailedPrecondition.WithMessage("its QEMU is gone")
	other := &teller{harness: h, Service: h.clone("other"), id: cid}
	err := other.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = dir })
	refused(t, "a checkpoint that can't be restored", err)
	if err != nil && !strings.Contains(err.Error(), "its QEMU is gone") {
		t.Errorf("no reason: %v", err)
	}
	if n := len(h.launcher.All()); n != before {
		t.Errorf("%d machines were made", n-before)
	}
}
