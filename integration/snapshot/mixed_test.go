package snapshot

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
)

// TestMixed has several containers saved, put back, cloned and their snapshots deleted at the same time, at random. In the end
// each is where it must be, and nothing is left.
func TestMixed(t *testing.T) {
	if os.Getenv("CUBE_TEST_LONG") != "" {
		mixes(t, 60)
	} else {
		mixes(t, 4)
	}
}

func mixes(t *testing.T, steps int) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	st := store(t)
	t.Run("containers", func(t *testing.T) {
		for i := range 3 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				client, ctx := connect(t)
				random := rand.New(rand.NewPCG(seed, uint64(i)))
				b := newBox(t, client, ctx, fmt.Sprint("mixed-", i)).run(ctx, "")
				shim := b.shim(ctx)
				n, at := 0, map[string]int{} // where it is, and where it was when it was saved
				for step := range steps {
					names := slices.Sorted(maps.Keys(at))
					what := random.IntN(6)
					if len(names) == 0 {
						what = 0
					}
					t.Logf("%d: operation %d at %d, snapshots %v", step, what, n, at)
					switch what {
					case 0, 1:
						name, err := shim.Save(ctx, "", "")
						must(t, err)
						at[name] = n
					case 2, 3:
						name := names[random.IntN(len(names))]
						_, err := shim.Rollback(ctx, name)
						must(t, err)
						n = at[name]
					case 4:
						name := names[random.IntN(len(names))]
						_, err := st.Delete(name)
						must(t, err)
						delete(at, name)
						if _, err := shim.Rollback(ctx, name); !errdefs.IsNotFound(err) {
							t.Errorf("put back to a snapshot that is gone: %v", err)
						}
					case 5:
						dir := b.checkpoint(ctx, client)
						clone := newBox(t, client, ctx, fmt.Sprint("mixed-", i, "-", step)).run(ctx, dir)
						clone.counts(n + 1)
						clone.end(ctx)
					}
					n++
					b.counts(n)
				}
				b.end(ctx)
				b.nothingLeft()
			})
		}
	})
	must(t, st.Sweep())
	if left, err := st.Lingering(); err != nil || len(left) > 0 {
		t.Errorf("deleted, but in use: %v, %v", left, err)
	}
}
