package admission

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
)

// policy has a disposable sandbox reserve a quarter of a CPU for each of its own, half of its memory, and a tenth of its disk.
func policy() *config.Admission {
	return &config.Admission{MemoryHeadroom: 1 << 30, CPUOvercommit: 4, MemoryOvercommit: 2, DiskOvercommit: 10, DisposableMemory: 64 << 20, MemoryPressure: 20, IOPressure: 50}
}

// host is one of 4 CPUs, 9 GiB of memory and 100 GiB of disk.
func host() Reading {
	return Reading{CPUs: 4, MemoryTotal: 9 << 30, MemoryAvailable: 9 << 30, DiskTotal: 100 << 30, DiskFree: 100 << 30}
}

func runs(team string, s Shape) Entry { return Entry{Team: team, Shape: s, Machine: true} }

func reason(err error) string {
	if r := (*Refusal)(nil); errors.As(err, &r) {
		return r.Reason
	}
	return ""
}

func TestNeed(t *testing.T) {
	for _, tc := range []struct {
		shape Shape
		want  Amount
	}{
		{Shape{2, 1024, 1000, ""}, Amount{500, 512 << 20, 100 << 20}},
		{Shape{2, 1024, 1000, Disposable}, Amount{500, 512 << 20, 100 << 20}},
		{Shape{1, 100, 10, Disposable}, Amount{250, 64 << 20, 1 << 20}}, // the floor
		{Shape{1, 32, 10, Disposable}, Amount{250, 32 << 20, 1 << 20}},  // which isn't more than it has
		{Shape{3, 1024, 1000, Resident}, Amount{3000, 1024<<20 + ProcessMemory, 1000 << 20}},
		{Shape{}, Amount{}},
	} {
		if got := Need(policy(), tc.shape); got != tc.want {
			t.Errorf("%+v: %+v, want %+v", tc.shape, got, tc.want)
		}
	}
	odd := *policy()
	odd.CPUOvercommit = 3
	if got := Need(&odd, Shape{VCPUs: 1}); got.MilliCPU != 334 {
		t.Errorf("a third of a CPU is %d", got.MilliCPU)
	}
	// By default a small one takes no more than 128 MB.
	defaults := config.Default().Admission
	if got := Need(&defaults, Shape{1, 512, 1024, ""}); got.Memory > 128_000_000 {
		t.Errorf("a disposable sandbox of 512 MiB takes %d", got.Memory)
	}
	for _, s := range []string{"", "disposable", "resident"} {
		if p, err := ParseProfile(s); err != nil || string(p) != s {
			t.Errorf("%q: %v", s, err)
		}
	}
	if _, err := ParseProfile("Resident"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("another profile: %v", err)
	}
}

// TestReserve: of many that come at once exactly those are let in that there is room for, whatever it is that is short.
// TestNever: only what wouldn't fit an empty host never fits.
func TestNever(t *testing.T) {
	for _, tc := range []struct {
		shape Shape
		want  string
	}{
		{Shape{16, 16 << 10, 1000 << 10, ""}, ""},
		{Shape{17, 1024, 1000, ""}, "4.25 CPUs are reserved, and it has 4"},
		{Shape{2, 17 << 10, 1000, ""}, "8704 MiB of memory are reserved, and it has 8192"},
		{Shape{4, 9 << 10, 1000, Resident}, "9280 MiB of memory"},
		{Shape{2, 1024, 1001 << 10, ""}, "of disk are reserved"},
	} {
		err := Never(policy(), tc.shape, host())
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%+v: %v", tc.shape, err)
		}
	}
}

func TestReserve(t *testing.T) {
	for want, tc := range map[string]struct {
		shape Shape
		host  func(*Reading)
	}{
		ReasonCPU:    {Shape{1, 1, 1, Resident}, func(h *Reading) { h.CPUs = 10 }},
		ReasonMemory: {Shape{1, 1600, 1, ""}, func(h *Reading) {}},
		ReasonDisk:   {Shape{1, 1, 10 << 10, ""}, func(h *Reading) { h.DiskTotal = 11<<30 - 1 }},
	} {
		h := host()
		tc.host(&h)
		l := NewLedger(policy(), &config.Limits{CreateBurst: 1})
		if n, short := l.Room("blue", tc.shape, h, 8<<30); n != 10 || short != want {
			t.Errorf("%s: there is room for %d, short is %s", want, n, short)
		}
		var mu sync.Mutex
		var all sync.WaitGroup
		good := 0
		for i := range 100 {
			all.Go(func() {
				err := l.Reserve(fmt.Sprint(i), runs("blue", tc.shape), h, true)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					good++
				} else if reason(err) != want || !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "left for sandboxes and this one needs") {
					t.Errorf("%s: refused with %v", want, err)
				}
			})
		}
		all.Wait()
		if good != 10 {
			t.Errorf("%s: %d were let in", want, good)
		}
	}
	// What is in use by whomever isn't there, either.
	h := host()
	if n, short := NewLedger(policy(), &config.Limits{}).Room("blue", Shape{1, 128, 1, ""}, h, 200<<20); n != 3 || short != ReasonAvailable {
		t.Errorf("with 200 MiB left there is room for %d, short is %s", n, short)
	}
	h.Pressure = Pressure{Memory: 20, Known: true}
	if n, short := NewLedger(policy(), &config.Limits{}).Room("blue", Shape{1, 128, 1, ""}, h, 8<<30); n != 0 || short != pressurePrefix+"memory" {
		t.Errorf("a host that is hard pressed has room for %d, short is %s", n, short)
	}
	h.Pressure = Pressure{}
	h.DiskFree = 99 << 20
	if err := NewLedger(policy(), &config.Limits{}).Reserve("a", runs("blue", Shape{1, 1, 1000, ""}), h, false); reason(err) != ReasonDisk {
		t.Errorf("the store is full: %v", err)
	}
}

// TestAccounts: a row takes the place of a reservation, whichever way it goes, and at any moment the sums are those of what there is.
func TestAccounts(t *testing.T) {
	l := NewLedger(policy(), &config.Limits{Running: 1})
	h, s := host(), Shape{2, 1024, 1000, ""}
	paused := Entry{Team: "blue", Shape: s}
	check := func(what string, reserved Amount, use Use) {
		t.Helper()
		if got := l.Totals(); got.Reserved != reserved || got.Teams["blue"] != use {
			t.Errorf("%s: %+v", what, got)
		}
	}
	up, asleep := Amount{500, 512 << 20, 100 << 20}, Amount{Disk: 100 << 20}
	run, sleep := Use{Running: 1, VCPUs: 2, Memory: 1 << 30, Disk: 1000 << 20}, Use{Paused: 1, Disk: 1000 << 20}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(l.Reserve("a", runs("blue", s), h, true))
	check("reserved", up, run)
	if err := l.Reserve("b", runs("blue", s), h, true); reason(err) != "team_running" {
		t.Errorf("another one: %v", err)
	}
	l.Set("a", runs("blue", s))
	check("written", up, run)
	l.Release("a")
	check("released", up, run)
	l.Set("a", paused)
	check("paused", asleep, sleep)
	must(l.Reserve("a", runs("blue", s), h, false))
	must(l.Reserve("a", runs("blue", s), h, false)) // somebody else wants it, too
	check("resumed twice", up, run)
	l.Release("a")
	l.Set("a", paused) // something else of its row
	check("one has given up", up, run)
	l.Release("a")
	check("both have", asleep, sleep)
	l.End("a")
	check("killed", asleep, Use{})
	l.Drop("a")
	check("gone", Amount{}, Use{})
	l.Set("b", runs("blue", s))
	l.End("b")
	check("one that runs is killed", up, Use{})
	l.Drop("b")
	// One that is made ahead becomes a team's.
	must(l.Reserve("c", Entry{Shape: s, Machine: true, Spare: true}, h, false))
	l.Set("c", Entry{Shape: s, Machine: true, Spare: true})
	l.Release("c")
	if got := l.Totals(); got.Spare != up || got.Reserved != up {
		t.Errorf("a spare one: %+v", got)
	}
	if n, _ := l.Room("red", Shape{4, 1024, 1000, ""}, Reading{CPUs: 1, MemoryTotal: 1 << 40, MemoryAvailable: 1 << 40, DiskTotal: 1 << 40, DiskFree: 1 << 40}, 1<<40); n != 1 { // it takes the place of that
		t.Errorf("with a spare one there is room for %d", n)
	}
	full := h
	full.CPUs, full.Pressure = 0, Pressure{Memory: 100, Known: true}
	must(l.Reserve("c", runs("blue", s), full, true))
	if got := l.Totals(); got.Spare != (Amount{}) || got.Reserved != up || got.Teams["blue"] != run {
		t.Errorf("a spare one that is taken: %+v", got)
	}
	l.Release("c") // whoever wanted it has failed
	if got := l.Totals(); got.Spare != up || got.Reserved != up || got.Teams["blue"] != (Use{}) {
		t.Errorf("a spare one that is given back: %+v", got)
	}
	l.Drop("c")
	l.Drop("nobody")
	l.Release("nobody")
	check("all gone", Amount{}, Use{})
	if len(l.accounts) != 0 {
		t.Errorf("accounts are left: %v", l.accounts)
	}
}

// TestSums has anything happen, and compares the sums with those of what there is.
func TestSums(t *testing.T) {
	l := NewLedger(policy(), &config.Limits{CreateBurst: 1, Running: 6})
	r := rand.New(rand.NewPCG(1, 2))
	h := host()
	for range 20_000 {
		id := fmt.Sprint(r.IntN(12))
		e := Entry{Team: []string{"", "blue", "red"}[r.IntN(3)], Shape: Shape{r.IntN(3), r.IntN(2000), r.IntN(2000), []Profile{"", Resident}[r.IntN(2)]}, Machine: r.IntN(2) == 0}
		e.Spare = e.Team == "" && r.IntN(2) == 0
		switch r.IntN(5) {
		case 0:
			l.Set(id, e)
		case 1:
			l.End(id)
		case 2:
			l.Drop(id)
		case 3:
			_ = l.Reserve(id, e, h, false)
		case 4:
			l.Release(id)
		}
	}
	want := Totals{Teams: map[string]Use{}}
	for _, a := range l.accounts {
		e := a.now()
		want.Reserved = want.Reserved.plus(l.needs(e))
		if e.Spare {
			want.Spare = want.Spare.plus(l.needs(e))
		}
		if e.Team != "" {
			want.Teams[e.Team] = want.Teams[e.Team].with(e, 1)
		}
	}
	if got := l.Totals(); got.Reserved != want.Reserved || got.Spare != want.Spare || got.Teams["blue"] != want.Teams["blue"] || got.Teams["red"] != want.Teams["red"] {
		t.Errorf("the sums are %+v, want %+v", got, want)
	}
}

func TestLimits(t *testing.T) {
	s := Shape{2, 1024, 2048, ""}
	one, none := 1, 0
	for want, tc := range map[string]struct {
		limits config.Limits
		say    []string
	}{
		"team_running": {config.Limits{Running: 2}, []string{"team blue may have 2 running sandboxes (limits.running), has 2, and this needs 1 more", "kill or pause"}},
		"team_vcpus":   {config.Limits{VCPUs: 5}, []string{"5 vCPUs", "(limits.vcpus), has 4, and this needs 2 more"}},
		"team_memory":  {config.Limits{Memory: 3<<30 - 1}, []string{"limits.memory", "has 2GiB, and this needs 1GiB more"}},
		"team_disk":    {config.Limits{Disk: 5 << 30}, []string{"limits.disk", "has 4GiB, and this needs 2GiB more", "kill one"}},
	} {
		l := NewLedger(policy(), &tc.limits)
		for i := range 3 {
			err := l.Reserve(fmt.Sprint(i), runs("blue", s), host(), false)
			if i < 2 && err != nil || i == 2 && (reason(err) != want || !errdefs.IsResourceExhausted(err)) {
				t.Errorf("%s: the sandbox %d: %v", want, i, err)
			}
			for _, say := range tc.say {
				if i == 2 && !strings.Contains(err.Error(), say) {
					t.Errorf("%q doesn't say %q", err, say)
				}
			}
		}
		if n, short := l.Room("blue", s, host(), 8<<30); n != 0 || short != want {
			t.Errorf("%s: there is room for %d, short is %s", want, n, short)
		}
		if err := l.Reserve("other", runs("red", s), host(), false); err != nil {
			t.Errorf("%s: another team: %v", want, err)
		}
		// What is paused has its disk, and no more.
		l.Set("0", Entry{Team: "blue", Shape: s})
		l.Release("0")
		if err := l.Reserve("3", runs("blue", s), host(), false); (want == "team_disk") != (err != nil) {
			t.Errorf("%s: in place of a paused one: %v", want, err)
		}
	}
	own := config.Limits{Running: 5, Team: map[string]config.TeamLimits{"blue": {Running: &one}, "red": {Running: &none}}}
	l := NewLedger(policy(), &own)
	l.Set("a", runs("blue", s))
	if err := l.Reserve("b", runs("blue", s), host(), false); err == nil || !strings.Contains(err.Error(), "may have 1 running sandboxes (limits.team.blue.running)") {
		t.Errorf("a limit of its own: %v", err)
	}
	for i := range 6 {
		if err := l.Reserve(fmt.Sprint("red", i), runs("red", s), host(), false); err != nil {
			t.Errorf("without limit: %v", err)
		}
	}
}

// TestLowered: what a team has is its own, also where that is more than it may have.
func TestLowered(t *testing.T) {
	s := Shape{2, 1024, 2048, ""}
	l := NewLedger(policy(), &config.Limits{Running: 1, Disk: 1 << 30})
	for i := range 3 {
		l.Set(fmt.Sprint(i), Entry{Team: "blue", Shape: s})
	}
	if err := l.Reserve("0", runs("blue", s), host(), false); err != nil {
		t.Errorf("one of those that there are: %v", err)
	}
	if err := l.Reserve("1", runs("blue", s), host(), false); reason(err) != "team_running" {
		t.Errorf("a second one: %v", err)
	}
}

func TestCreateRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLedger(policy(), &config.Limits{CreatesPerMinute: 60, CreateBurst: 3})
		n := 0
		create := func() error {
			n++
			defer l.Drop(fmt.Sprint(n))
			return l.Reserve(fmt.Sprint(n), runs("blue", Shape{VCPUs: 1}), host(), true)
		}
		for i := range 5 {
			err := create()
			var r *Refusal
			switch {
			case i < 3 && err != nil:
				t.Errorf("%d at once: %v", i+1, err)
			case i >= 3 && (!errors.As(err, &r) || r.Reason != "team_creates_per_minute" || r.After != time.Second || !errdefs.IsResourceExhausted(err)):
				t.Errorf("%d at once: %v", i+1, err)
			}
		}
		if err := l.Reserve("resumed", runs("blue", Shape{VCPUs: 1}), host(), false); err != nil {
			t.Errorf("what isn't a create: %v", err)
		}
		if err := l.Reserve("other", runs("red", Shape{VCPUs: 1}), host(), true); err != nil {
			t.Errorf("another team: %v", err)
		}
		time.Sleep(999 * time.Millisecond)
		if err := create(); err == nil {
			t.Error("too early")
		}
		time.Sleep(time.Millisecond)
		if err := create(); err != nil {
			t.Errorf("a second later: %v", err)
		}
		// What isn't let in for something else takes none.
		full := host()
		full.CPUs = 0
		time.Sleep(time.Second)
		for range 3 {
			if err := l.Reserve("full", runs("blue", Shape{VCPUs: 1}), full, true); reason(err) != ReasonCPU {
				t.Errorf("on a full host: %v", err)
			}
		}
		if err := create(); err != nil {
			t.Errorf("after that: %v", err)
		}
		time.Sleep(time.Hour)
		for i := range 4 {
			if err := create(); (err == nil) != (i < 3) {
				t.Errorf("%d after an hour: %v", i+1, err)
			}
		}
	})
}

func TestBrake(t *testing.T) {
	for want, p := range map[string]Pressure{
		"":                {CPU: 100, Memory: 19.9, IO: 49, Known: true}, // that of CPUs doesn't matter
		"pressure_memory": {Memory: 20, Known: true},
		"pressure_io":     {IO: 50, Known: true},
		"unknown":         {Memory: 100, IO: 100},
	} {
		l := NewLedger(policy(), &config.Limits{})
		s := Shape{1, 64, 64, ""}
		l.Set("paused", Entry{Team: "blue", Shape: s})
		h := host()
		h.Pressure = p
		for _, id := range []string{"new", "paused"} {
			err := l.Reserve(id, runs("blue", s), h, false)
			if want == "" || want == "unknown" {
				if err != nil {
					t.Errorf("%+v: %v", p, err)
				}
				continue
			}
			var r *Refusal
			if !errors.As(err, &r) || r.Reason != want || r.After < time.Second || !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "admission."+strings.TrimPrefix(want, "pressure_")+"_pressure") {
				t.Errorf("%+v: %v", p, err)
			}
		}
	}
}

func TestSnapshots(t *testing.T) {
	l := NewLedger(policy(), &config.Limits{Snapshots: 3})
	// As many as there is room for of those that come at once, wherever they are when the next one asks.
	var mu sync.Mutex
	var all sync.WaitGroup
	made, failed := 1, 0
	count := func() (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return made, nil
	}
	for range 50 {
		all.Go(func() {
			done, err := l.BeginSnapshot("blue", count)
			if err != nil {
				mu.Lock()
				failed++
				mu.Unlock()
				if reason(err) != "team_snapshots" {
					t.Errorf("refused with %v", err)
				}
				return
			}
			mu.Lock()
			made++
			mu.Unlock()
			done()
		})
	}
	all.Wait()
	if made > 3 || made+failed != 51 {
		t.Errorf("there are %d snapshots, %d failed", made, failed)
	}
	made = 2
	done, err := l.BeginSnapshot("blue", count)
	if err != nil {
		t.Errorf("the last one: %v", err)
	}
	if _, err := l.BeginSnapshot("blue", count); err == nil || !strings.Contains(err.Error(), "may have 3 snapshots of sandboxes (limits.snapshots), has 3") {
		t.Errorf("one too many: %v", err)
	}
	done()
	if _, err := l.BeginSnapshot("blue", func() (int, error) { return 0, errors.ErrUnsupported }); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("it isn't known how many: %v", err)
	}
	if l.teams["blue"].snapshots != 0 {
		t.Errorf("%d are being made", l.teams["blue"].snapshots)
	}
}
