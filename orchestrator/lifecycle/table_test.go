package lifecycle

import (
	"fmt"
	"strings"
	"testing"
)

// TestTable walks all of the table: what isn't here must be refused.
func TestTable(t *testing.T) {
	want := map[string]State{
		"creating runs": Running, "creating unfit": Killing, "creating gone": Killing, "creating kill": Killing,
		"running pause": Pausing, "running save": Snapshotting, "running touch": Running, "running kill": Killing,
		"running expire": Killing, "running expire autoPause": Pausing, "running runs": Running, "running still": Paused, "running gone": Killing,
		"pausing runs": Running, "pausing still": Paused, "pausing gone": Killing, "pausing kill": Killing,
		"paused resume": Resuming, "paused kill": Killing, "paused still": Paused, "paused gone": Killing,
		"resuming runs": Running, "resuming still": Paused, "resuming gone": Killing, "resuming kill": Killing,
		"snapshotting touch": Snapshotting, "snapshotting runs": Running, "snapshotting still": Paused, "snapshotting gone": Killing, "snapshotting kill": Killing,
		"killing runs": Killing, "killing still": Killing, "killing unfit": Killing, "killing kill": Killing, "killing gone": gone,
	}
	events := []event{evPause, evResume, evSave, evTouch, evKill, evExpire, evRuns, evStill, evGone, evUnfit}
	seen := 0
	for s := range table {
		for _, ev := range events {
			for _, autoPause := range []bool{false, true} {
				name := fmt.Sprintf("%s %s", s, ev)
				expect, ok := want[name]
				if special, has := want[name+" autoPause"]; autoPause && has {
					expect = special
				}
				to, possible := next(&row{State: s, spec: spec{AutoPause: autoPause}}, ev)
				if possible != ok || to != expect {
					t.Errorf("%s, autoPause %v: to %q, possible: %v; want %q, %v", name, autoPause, to, possible, expect, ok)
				}
				if ok {
					seen++
				} else if err := refused(&row{ID: "i1", State: s}, ev); !strings.Contains(err.Error(), "i1") {
					t.Errorf("%s is refused with %v", name, err)
				}
			}
		}
		// Each state is left by a kill, and no busy one is without an end.
		if to, ok := next(&row{State: s}, evKill); !ok || to != Killing {
			t.Errorf("%s isn't left by a kill", s)
		}
		if to, ok := next(&row{State: s}, evGone); !ok || to != Killing && s != Killing {
			t.Errorf("%s isn't left when the machine is gone", s)
		}
	}
	if n := 2 * (len(want) - 1); seen != n {
		t.Errorf("%d of %d rules were seen", seen, n)
	}
	if len(table) != 7 {
		t.Errorf("%d states", len(table))
	}
}
