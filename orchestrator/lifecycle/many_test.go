package lifecycle

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

// TestMany has many of everything at once.
func TestMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 8})
		ctx := t.Context()
		watched := make(chan error, 1)
		wctx, stop := context.WithCancel(ctx)
		ways := map[string]ingress.Route{}
		go func() {
			watched <- s.Routes().Watch(wctx, func(u ingress.Update) error {
				for _, w := range u.Routes {
					ways[w.SandboxID] = w
				}
				for _, id := range u.Gone {
					delete(ways, id)
				}
				return nil
			})
		}()
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				sb, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour, Secure: true})
				if err != nil {
					t.Error(err)
					return
				}
				var each sync.WaitGroup
				for j := range 4 {
					each.Go(func() {
						for k := range 5 {
							var err error
							switch (i + j + k) % 5 {
							case 0:
								err = s.Pause(ctx, team, sb.ID, true)
							case 1:
								_, _, err = s.Connect(ctx, team, sb.ID, time.Hour, nil)
							case 2:
								err = s.SetTimeout(ctx, team, sb.ID, time.Hour)
							case 3:
								_, err = s.Get(ctx, team, sb.ID)
							case 4:
								_, err = s.Snapshot(ctx, team, sb.ID, "")
							}
							if err != nil && !errdefs.IsFailedPrecondition(err) {
								t.Errorf("%d: %v", (i+j+k)%5, err)
							}
						}
					})
				}
				each.Wait()
				if i%2 == 0 {
					if err := s.Kill(ctx, team, sb.ID); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		synctest.Wait()
		if len(s.host.overlap) > 0 {
			t.Errorf("calls at the same time: %v", s.host.overlap)
		}
		rows, err := s.db.SandboxesIn(ctx)
		must(t, err)
		if len(rows) != 50 || len(s.host.machines) != 50 || len(ways) != 50 {
			t.Errorf("%d rows, %d machines, %d ways", len(rows), len(s.host.machines), len(ways))
		}
		for _, r := range rows {
			if way, m := ways[r.ID], s.host.machines[r.ID]; way.State != r.State || way.Addr != m.addr {
				t.Errorf("%s is %s, its way %v, its machine at %v", r.ID, r.State, way, m.addr)
			}
		}
		stop()
		<-watched
		s.stop()
	})
}
