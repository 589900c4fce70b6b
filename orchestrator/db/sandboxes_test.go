package db

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func TestSandboxes(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, "default", "base")
	build(t, d, "blue", "own")
	began := time.Now().Truncate(time.Second).UTC()
	for i := range 9 {
		s := row(b, "default", fmt.Sprintf("i%d", i))
		s.StartedAt = began.Add(time.Duration(i/2) * time.Second) // ties
		if i%3 == 0 {
			s.State = "paused"
		}
		must(t, d.AddSandbox(ctx, s))
	}
	must(t, d.AddSandbox(ctx, row(b, "blue", "other")))
	if err := d.AddSandbox(ctx, row(b, "blue", "i1")); !errdefs.IsAlreadyExists(err) || strings.Contains(err.Error(), d.path) {
		t.Errorf("the same id: %v", err)
	}
	odd := row(b, "blue", "odd")
	odd.Metadata = map[string]string{"a": "\x00", "": "", "ü\u2028\"": "{}"}
	must(t, d.AddSandbox(ctx, odd))
	if s, err := d.Sandbox(ctx, "blue", "odd"); err != nil || !maps.Equal(s.Metadata, odd.Metadata) {
		t.Errorf("odd metadata: %q, %v", s.Metadata, err)
	}
	for _, asc := range []bool{true, false} {
		f := Filter{Team: "default", States: []string{"running", "paused"}, Ascending: asc, Page: Page{Limit: 2}}
		var ids []string
		for {
			page, err := d.Sandboxes(ctx, f)
			must(t, err)
			for _, s := range page {
				ids = append(ids, s.ID)
			}
			if len(page) < f.Limit {
				break
			}
			f.After, f.AfterID = page[len(page)-1].StartedAt, page[len(page)-1].ID
		}
		if !asc {
			slices.Reverse(ids)
		}
		if got := strings.Join(ids, " "); got != "i0 i1 i2 i3 i4 i5 i6 i7 i8" {
			t.Errorf("ascending %v: %s", asc, got)
		}
	}
	for name, c := range map[string]struct {
		f    Filter
		want string
	}{
		"paused":        {Filter{States: []string{"paused"}}, "i6 i3 i0"},
		"metadata":      {Filter{Metadata: map[string]string{"k": "i4", "all": "same"}}, "i4"},
		"none has both": {Filter{Metadata: map[string]string{"k": "i4", "all": "other"}}, ""},
		"since":         {Filter{Since: began.Add(2 * time.Second)}, "i8 i7 i6"},
		"template":      {Filter{Template: "nosuch"}, ""},
	} {
		c.f.Team, c.f.Limit = "default", 100
		if c.f.States == nil {
			c.f.States = []string{"running", "paused"}
		}
		page, err := d.Sandboxes(ctx, c.f)
		must(t, err)
		var ids []string
		for _, s := range page {
			ids = append(ids, s.ID)
		}
		if got := strings.Join(ids, " "); got != c.want {
			t.Errorf("%s: %q", name, got)
		}
	}
	for name, c := range map[string]struct {
		f    Filter
		want int
	}{
		"running":       {Filter{States: []string{"running"}, Page: Page{After: began, AfterID: "i1", Limit: 1}}, 6},
		"of a template": {Filter{States: []string{"running"}, Template: "nosuch"}, 0},
		"metadata":      {Filter{States: []string{"running"}, Metadata: map[string]string{"k": "i4"}}, 1},
		"since":         {Filter{States: []string{"running"}, Since: began.Add(2 * time.Second)}, 2},
	} {
		c.f.Team = "default"
		if n, err := d.CountSandboxes(ctx, c.f); err != nil || n != c.want {
			t.Errorf("%s: %d, %v", name, n, err)
		}
	}
	s, err := d.Sandbox(ctx, "default", "i1")
	must(t, err)
	s.State, s.Spec = "pausing", json.RawMessage(`{"b":2}`)
	must(t, d.SetSandbox(ctx, s, "running"))
	if err := d.SetSandbox(ctx, s, "running"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("set twice: %v", err)
	}
	if _, err := d.Sandbox(ctx, "blue", "i1"); !errdefs.IsNotFound(err) {
		t.Errorf("another team's: %v", err)
	}
	must(t, d.DropSandbox(ctx, "i1", "its machine has ended"))
	must(t, d.DropSandbox(ctx, "i1", ""))
	must(t, d.DropSandbox(ctx, "i2", ""))
	if _, why, err := d.Ended(ctx, "default", "i1"); err != nil || why != "its machine has ended" {
		t.Errorf("ended: %q, %v", why, err)
	}
	if _, _, err := d.Ended(ctx, "default", "i2"); !errdefs.IsNotFound(err) {
		t.Errorf("one that was killed has ended: %v", err)
	}
	var left int
	must(t, d.write.QueryRow("SELECT count(*) FROM metadata WHERE sandbox IN ('i1', 'i2')").Scan(&left))
	if left != 0 {
		t.Errorf("%d pairs of metadata are left", left)
	}
}

// TestGivenUp: a row that couldn't be written in time is as it was, and one that was written isn't told as given up.
func TestGivenUp(t *testing.T) {
	d := fresh(t)
	s := row(build(t, d, "default", "base"), "default", "i1")
	must(t, d.AddSandbox(t.Context(), s))
	var longest time.Duration
	for i := range 20 {
		began, from := time.Now(), s.State
		s.State = fmt.Sprintf("try %d", i)
		must(t, d.SetSandbox(t.Context(), s, from))
		longest = max(longest, time.Since(began))
	}
	late := 0
	for i := range 300 {
		from := s.State
		next := s
		next.State = fmt.Sprintf("again %d", i)
		ctx, cancel := context.WithTimeout(t.Context(), longest*time.Duration(i%50)/50)
		err := d.SetSandbox(ctx, next, from)
		cancel()
		if err == nil {
			s = next
		} else {
			late++
		}
		if is, err := d.Sandbox(t.Context(), "", "i1"); err != nil || is.State != s.State {
			t.Fatalf("it is %q where it was to be %q: %v", is.State, s.State, err)
		}
	}
	if late == 0 || late == 300 {
		t.Errorf("%d of 300 were given up", late)
	}
}

// TestListIsIndexed: a page takes no longer for what isn't on it.
func TestListIsIndexed(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, "default", "base")
	const rows = 10_000
	must(t, d.update(ctx, func(tx *sql.Tx) error {
		began := time.Now()
		for i := range rows {
			id := fmt.Sprintf("i%05d", i)
			_, err := tx.ExecContext(ctx, "INSERT INTO sandboxes (id, team, template, build, state, started, deadline, spec) VALUES (?, 'default', ?, ?, 'paused', ?, 0, '{}')",
				id, b.Template, b.ID, stamp(began.Add(time.Duration(i)*time.Millisecond)))
			if err == nil {
				_, err = tx.ExecContext(ctx, "INSERT INTO metadata (sandbox, key, value) VALUES (?, 'k', ?)", id, id)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}))
	measure := func(f Filter, want int) time.Duration {
		t.Helper()
		f.Team, f.States, f.Limit = "default", []string{"running", "paused"}, 100
		var took []time.Duration
		for range 20 {
			began := time.Now()
			page, err := d.Sandboxes(ctx, f)
			took = append(took, time.Since(began))
			if must(t, err); len(page) != want {
				t.Fatalf("%d rows", len(page))
			}
		}
		slices.Sort(took)
		return took[len(took)*95/100]
	}
	t.Logf("a page: %v; one by metadata: %v", measure(Filter{}, 100), measure(Filter{Metadata: map[string]string{"k": "i00000"}}, 1))
	var plan []string
	for _, order := range []string{"DESC", "ASC"} {
		rows, err := d.read.QueryContext(ctx, "EXPLAIN QUERY PLAN SELECT id FROM sandboxes WHERE team = 'default' AND (started, id) < (1, '') AND state IN ('running', 'paused') ORDER BY started "+order+", id "+order+" LIMIT 100")
		must(t, err)
		for rows.Next() {
			var a, b, c int
			var detail string
			must(t, rows.Scan(&a, &b, &c, &detail))
			plan = append(plan, detail)
		}
		must(t, errors.Join(rows.Err(), rows.Close()))
	}
	if s := strings.Join(plan, "\n"); strings.Count(s, "sandboxes_listed") != 2 || strings.Contains(s, "TEMP B-TREE") || strings.Contains(s, "SCAN") {
		t.Errorf("the plan is\n%s", s)
	}
}

// TestParallel: writers wait for each other, and readers for none.
func TestParallel(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, "default", "base")
	errs := make(chan error)
	const n = 50
	for i := range n {
		go func() {
			s := row(b, "default", fmt.Sprintf("i%d", i))
			err := d.AddSandbox(ctx, s)
			for _, next := range []string{"pausing", "paused"} {
				from := s.State
				s.State = next
				_, e := d.Sandbox(context.WithoutCancel(ctx), "", s.ID)
				err = errors.Join(err, e, d.SetSandbox(ctx, s, from))
			}
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if got, err := d.CountSandboxes(ctx, Filter{Team: "default", States: []string{"paused"}}); err != nil || got != n {
		t.Errorf("%d rows, %v", got, err)
	}
}
