package lifecycle

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

// TestMachineEndsAmidCreate: a machine that ends while it is told who it is isn't waited for. Of the pool, another one is made in its
// place; otherwise whoever has asked is to try again.
func TestMachineEndsAmidCreate(t *testing.T) {
	for name, members := range map[string]int{"claim": 1, "create": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := filled(t, members)
				defer s.stop()
				kept := s.still()
				amid := make(chan struct{})
				var once sync.Once
				s.host.luck(func(ctx context.Context, call, _ string, after bool) (err error) {
					if (call == "init" || call == "tell") && !after {
						once.Do(func() {
							close(amid)
							<-ctx.Done() // nobody answers
							err = errFake
						})
					}
					return err
				})
				go func() {
					<-amid
					s.host.mu.Lock()
					id := slices.Collect(maps.Keys(s.host.machines))[0]
					s.host.mu.Unlock()
					s.host.end(id)
				}()
				began := time.Now()
				sb, err := s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour})
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
				switch {
				case members > 0 && (err != nil || sb.ID == kept[0]):
					t.Errorf("%s is made of %s: %v", sb.ID, kept[0], err)
				case members == 0 && (!errdefs.IsUnavailable(err) || RetryAfter(err) == 0 || !strings.Contains(err.Error(), "has ended before it was ready")):
					t.Errorf("create: %v", err)
				}
				s.host.luck(nil)
				pass(time.Minute)
				s.whole()
			})
		})
	}
}

// TestMemberEndsAmidMaking: nor is one that is to be a member.
func TestMemberEndsAmidMaking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, pooled(1))
		defer s.stop()
		amid := make(chan struct{})
		var once sync.Once
		s.host.luck(func(ctx context.Context, call, _ string, after bool) (err error) {
			if call == "exec" && !after { // only members are told to do anything
				once.Do(func() {
					close(amid)
					<-ctx.Done()
					err = errFake
				})
			}
			return err
		})
		s.create(nil)
		<-amid
		ended := s.members()[0]
		s.host.end(ended)
		pass(lossRest + 5*time.Second)
		if got := s.still(); len(got) != 1 || got[0] == ended {
			t.Errorf("members %q after the end of %s", got, ended)
		}
		s.whole()
	})
}
