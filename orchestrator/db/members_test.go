package db

import (
	"sync"
	"testing"

	"github.com/containerd/errdefs"
)

// TestMembers: a member is claimed by one of many, if it is ready and of the build that is asked for, and is a sandbox then.
func TestMembers(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, DefaultTeam, "base")
	for _, id := range []string{"one", "two"} {
		must(t, d.AddMember(ctx, id, b.ID))
	}
	if err := d.AddMember(ctx, "three", "none"); !errdefs.IsNotFound(err) {
		t.Errorf("a member of a build that there isn't: %v", err)
	}
	claim := func(id, build string) error {
		s := row(b, DefaultTeam, id)
		s.Build = build
		return d.ClaimMember(ctx, s)
	}
	if err := claim("one", b.ID); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("one that isn't ready was claimed: %v", err)
	}
	must(t, d.MemberReady(ctx, "one"))
	if err := d.MemberReady(ctx, "none"); !errdefs.IsNotFound(err) {
		t.Errorf("one that isn't there is ready: %v", err)
	}
	if err := claim("one", "other"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("one of another build was claimed: %v", err)
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	won := 0
	for range 20 {
		all.Go(func() {
			err := claim("one", b.ID)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				won++
			} else if !errdefs.IsFailedPrecondition(err) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	sb, err := d.Sandbox(ctx, DefaultTeam, "one")
	if won != 1 || err != nil || sb.Build != b.ID {
		t.Errorf("%d have claimed it; it is %+v, %v", won, sb, err)
	}
	members, err := d.Members(ctx)
	if err != nil || len(members) != 1 || members[0].ID != "two" || members[0].Ready || members[0].Stale || members[0].Build.ID != b.ID {
		t.Errorf("members %+v, %v", members, err)
	}

	// A template that is deleted leaves its build while there are members of it.
	must(t, d.DropSandbox(ctx, "one", ""))
	must(t, d.DeleteTemplate(ctx, DefaultTeam, Ref{Name: "base"}))
	if members, err = d.Members(ctx); err != nil || len(members) != 1 || !members[0].Stale {
		t.Errorf("members %+v, %v", members, err)
	}
	if loose, err := d.Loose(ctx); err != nil || len(loose) != 0 {
		t.Errorf("loose: %+v, %v", loose, err)
	}
	must(t, d.DropMember(ctx, "two"))
	must(t, d.DropMember(ctx, "two")) // nothing to do
	if loose, err := d.Loose(ctx); err != nil || len(loose) != 1 || loose[0].ID != b.ID {
		t.Errorf("loose: %+v, %v", loose, err)
	}
}
