package lifecycle

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
)

// TestTurns: who has the fewest is next, of those who has waited longest; who gives up leaves no trace.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(2)
		came := make(chan string, 10)
		wait := func(ctx context.Context, team string) {
			go func() {
				if err := turns.wait(ctx, team); err != nil {
					team = "no " + team + ": " + err.Error()
				}
				came <- team
			}()
			synctest.Wait()
		}
		ctx := t.Context()
		many := strings.Fields("a a a a a a")
		for _, team := range many {
			wait(ctx, team)
		}
		impatient, giveUp := context.WithCancelCause(ctx)
		wait(impatient, "c")
		giveUp(errors.New("enough"))
		wait(ctx, "b")
		wait(ctx, "d")
		if turns.try("pool") {
			t.Error("who can wait is before those who do")
		}
		order := []string{}
		for len(came) > 0 || turns.taken > 0 {
			team := <-came
			order = append(order, team)
			if !strings.HasPrefix(team, "no ") {
				turns.done(team)
			}
			synctest.Wait()
		}
		if want := strings.Fields("a a b a d a a a"); !slices.Equal(slices.DeleteFunc(slices.Clone(order), func(o string) bool { return o == "no c: enough" }), want) || len(order) != len(want)+1 {
			t.Errorf("%q, not %q", order, want)
		}
		if len(turns.of) != 0 || len(turns.queued) != 0 {
			t.Errorf("left: %+v", turns)
		}
		if !turns.try("pool") || turns.try("pool") {
			t.Error("who can wait has half of them, and no more")
		}
		turns.done("pool")
	})
}
