package task

import (
	"slices"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"

	"github.com/cubesandbox/cube/vmm"
)

// TestRollbackOfEnded: a container that had ended when the pod was saved doesn't come back; its id can be used again as soon as
// it is deleted, before or after the rollback.
func TestRollbackOfEnded(t *testing.T) {
	h := newHarness(t)
	h.member(cid, nil, "sleep").run()
	b := h.member("b", nil, "sleep").run()
	remove := func() { h.must(second(h.Service.Delete(t.Context(), &taskapi.DeleteRequest{ID: b.id}))) }
	end := func() {
		h.must(second(h.Service.Kill(t.Context(), &taskapi.KillRequest{ID: b.id, Signal: 9})))
		h.must(second(h.Service.Wait(t.Context(), &taskapi.WaitRequest{ID: b.id})))
	}
	end()
	h.save("ended")
	for _, c := range []struct {
		what          string
		before, after func()
	}{
		{"deleted before", remove, func() {}},
		{"deleted after", func() {}, remove},
		{"deleted, made again and ended before", func() { remove(); b.run(); end() }, remove},
	} {
		t.Log(c.what)
		c.before()
		h.rollback("ended")
		c.after()
		if s := h.launcher.Last().Serials(); !slices.Equal(s, []string{vmm.RootSerial}) {
			t.Errorf("%s: disks %q", c.what, s)
		}
		b.run()
		end()
	}
	remove()
}
