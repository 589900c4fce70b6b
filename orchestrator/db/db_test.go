package db

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func open(t *testing.T, path string) *DB {
	t.Helper()
	d, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func fresh(t *testing.T) *DB { return open(t, filepath.Join(t.TempDir(), "control", "cube.db")) }

// build makes a team and a template of it with one build, and returns the build.
func build(t *testing.T, d *DB, team, name string) Build {
	t.Helper()
	if _, err := d.CreateKey(t.Context(), team); err != nil {
		t.Fatal(err)
	}
	id := "build-" + team + "-" + name
	b := Build{ID: id, Snapshot: "snap-" + id, CreatedAt: time.Now(), CPUs: 2, MemoryMB: 512, DiskMB: 1024, Settings: Settings{EnvdVersion: "0.6.13", Hook: &Hook{Port: 8080, Path: "/who"}}}
	must(t, d.BeginBuild(t.Context(), b))
	_, err := d.Publish(t.Context(), Publication{Build: id, Team: team, Name: name, Template: "t" + team + name, Tag: DefaultTag, Public: team == DefaultTeam})
	must(t, err)
	b, err = d.Build(t.Context(), id)
	must(t, err)
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func row(b Build, team, id string) Sandbox {
	now := time.Now().Truncate(time.Microsecond).UTC()
	return Sandbox{ID: id, Team: team, Template: b.Template, Build: b.ID, State: "running", StartedAt: now, Deadline: now.Add(time.Minute),
		Metadata: map[string]string{"k": id, "all": "same"}, Spec: json.RawMessage(`{"a":1}`)}
}

// TestFile: the file is its owner's alone, outlives its process, and what isn't a database of ours is said to be so, and left
// as it is.
func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control", "cube.db")
	d := open(t, path)
	b := build(t, d, "default", "base")
	must(t, d.AddSandbox(t.Context(), row(b, "default", "i1")))
	for _, p := range []string{path, path + "-wal"} {
		st, err := os.Stat(p)
		must(t, err)
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", p, st.Mode())
		}
	}
	for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1"} {
		var got string
		must(t, d.write.QueryRow("PRAGMA "+pragma).Scan(&got))
		if got != want {
			t.Errorf("%s is %s", pragma, got)
		}
	}
	must(t, d.Close())
	d = open(t, path)
	if s, err := d.Sandbox(t.Context(), "default", "i1"); err != nil || s.Metadata["k"] != "i1" || string(s.Spec) != `{"a":1}` {
		t.Errorf("after another start: %+v, %v", s, err)
	}
	_, err := d.write.Exec("PRAGMA user_version = 99")
	must(t, err)
	must(t, d.Close())
	if _, err := Open(t.Context(), path); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "version 99") {
		t.Errorf("a later version: %v", err)
	}
	for name, damage := range map[string]func([]byte) []byte{
		"not a database":  func([]byte) []byte { return []byte(strings.Repeat("this is none\n", 500)) },
		"a damaged one":   func(b []byte) []byte { copy(b[5000:], strings.Repeat("\xff", 20000)); return b },
		"one cut in half": func(b []byte) []byte { return b[:len(b)/2] },
	} {
		bad := filepath.Join(t.TempDir(), "cube.db")
		good, err := os.ReadFile(path)
		must(t, err)
		content := damage(good)
		must(t, os.WriteFile(bad, content, 0o600))
		if _, err := Open(t.Context(), bad); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), bad+" is damaged") || !strings.Contains(err.Error(), "restore a backup") {
			t.Errorf("%s: %v", name, err)
		}
		if after, err := os.ReadFile(bad); err != nil || !slices.Equal(after, content) {
			t.Errorf("%s was changed", name)
		}
	}
}

// TestWrittenIsKept: what a call has written is there whenever the process is killed.
func TestWrittenIsKept(t *testing.T) {
	if path := os.Getenv("DB_TEST_WRITER"); path != "" {
		d := open(t, path)
		b, err := d.Build(t.Context(), "build-default-base")
		must(t, err)
		for i := 0; ; i++ {
			must(t, d.AddSandbox(t.Context(), row(b, "default", fmt.Sprintf("i%d", i))))
			fmt.Println(i)
		}
	}
	path := filepath.Join(t.TempDir(), "cube.db")
	d := open(t, path)
	build(t, d, "default", "base")
	must(t, d.Close())
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run", "^TestWrittenIsKept$", "-test.v")
	cmd.Env = append(os.Environ(), "DB_TEST_WRITER="+path)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	last := -1
	for last < 20 {
		var line string
		if _, err := fmt.Fscanln(out, &line); err != nil && line == "" && !strings.Contains(err.Error(), "newline") {
			t.Fatal(err)
		}
		fmt.Sscan(line, &last)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	d = open(t, path)
	for i := 0; i <= last; i++ {
		if _, err := d.Sandbox(t.Context(), "default", fmt.Sprintf("i%d", i)); err != nil {
			t.Fatalf("%d of %d: %v", i, last, err)
		}
	}
}

func TestKeys(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	key, err := d.CreateKey(ctx, "")
	must(t, err)
	other, err := d.CreateKey(ctx, "blue")
	must(t, err)
	if !keyForm.MatchString(key) || key == other {
		t.Fatalf("keys %q and %q", key, other)
	}
	for k, want := range map[string]string{key: DefaultTeam, other: "blue"} {
		if team, err := d.Authenticate(ctx, k); err != nil || team != want {
			t.Errorf("a key of %s: %q, %v", want, team, err)
		}
	}
	for _, k := range []string{"", "e2b_", key + "0", strings.ToUpper(key), KeyPrefix + strings.Repeat("0", 40), "' OR 1=1 --"} {
		if team, err := d.Authenticate(ctx, k); !errdefs.IsUnauthorized(err) {
			t.Errorf("%q: %q, %v", k, team, err)
		}
	}
	keys, err := d.Keys(ctx)
	must(t, err)
	if len(keys) != 2 || keys[0].Team != DefaultTeam || keys[0].UsedAt.IsZero() || !strings.HasPrefix(key, KeyPrefix+keys[0].Prefix) || !strings.HasSuffix(key, keys[0].Suffix) {
		t.Errorf("keys %+v", keys)
	}
	must(t, d.RevokeKey(ctx, keys[0].ID))
	must(t, d.RevokeKey(ctx, other))
	for _, k := range []string{key, other} {
		if _, err := d.Authenticate(ctx, k); !errdefs.IsUnauthorized(err) {
			t.Errorf("a revoked key: %v", err)
		}
	}
	if err := d.RevokeKey(ctx, keys[0].ID); !errdefs.IsNotFound(err) {
		t.Errorf("revoked twice: %v", err)
	}
	for _, team := range []string{"A", "a b", "../x", strings.Repeat("x", 65), "-a"} {
		if _, err := d.CreateKey(ctx, team); !errdefs.IsInvalidArgument(err) {
			t.Errorf("team %q: %v", team, err)
		}
	}
	dump, err := os.ReadFile(d.path)
	must(t, err)
	wal, _ := os.ReadFile(d.path + "-wal")
	if s := string(dump) + string(wal); strings.Contains(s, key) || strings.Contains(s, key[len(KeyPrefix):]) {
		t.Error("the key is in the file")
	}
}

func TestTemplates(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	base := build(t, d, "default", "base")
	own := build(t, d, "blue", "own")
	for _, c := range []struct{ team, ref, build string }{
		{"default", "base", base.ID}, {"blue", "base", base.ID}, {"blue", "default/BASE:default", base.ID}, {"blue", base.Template, base.ID},
		{"blue", "own", own.ID}, {"blue", "blue/own", own.ID}, {"blue", own.Template + ":default", own.ID},
		{"default", "own", ""}, {"default", "blue/own", ""}, {"default", own.Template, ""}, {"blue", "own:v2", ""}, {"blue", "nosuch", ""},
	} {
		r, err := ParseRef(c.ref)
		must(t, err)
		_, b, err := d.Resolve(ctx, c.team, r)
		if b.ID != c.build || errdefs.IsNotFound(err) != (c.build == "") {
			t.Errorf("%s's %s: build %q, %v", c.team, c.ref, b.ID, err)
		}
		if c.build == base.ID && (b.Settings.Hook == nil || b.Settings.Hook.Port != 8080 || b.MemoryMB != 512) {
			t.Errorf("the build is %+v", b)
		}
	}
	for _, bad := range []string{"", "a b", "a/b/c", "a:b:c", "a:", ":b", "/a", "a/", "ä", "a\x00", "../x", strings.Repeat("x", 129)} {
		if r, err := ParseRef(bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q is %+v, %v", bad, r, err)
		}
	}
	all, err := d.Templates(ctx, "blue", Page{Limit: 10})
	must(t, err)
	if len(all) != 2 || all[0].Names[0] != "own" || all[1].Names[0] != "base" || !all[1].Public || all[1].Builds != 1 {
		t.Errorf("templates %+v", all)
	}

	// A snapshot by the same name is another build of the same template; the one before goes when no sandbox is of it.
	snap := func(id, name, tag string) (string, error) {
		must(t, d.BeginBuild(ctx, Build{ID: id, Snapshot: id, Origin: "i1", CreatedAt: time.Now()}))
		return d.Publish(ctx, Publication{Build: id, Team: "blue", Name: name, Template: "t" + id, Tag: tag, Snapshot: true})
	}
	if _, err := snap("s0", "own", DefaultTag); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a snapshot by a template's name: %v", err)
	}
	must(t, d.DropBuild(ctx, "s0"))
	first, err := snap("s1", "mine", DefaultTag)
	must(t, err)
	must(t, d.AddSandbox(ctx, row(Build{ID: "s1", Template: first}, "blue", "child")))
	second, err := snap("s2", "mine", DefaultTag)
	must(t, err)
	_, err = snap("s3", "mine", "v2")
	must(t, err)
	if first != second {
		t.Errorf("templates %s and %s", first, second)
	}
	loose := func() (ids []string) {
		t.Helper()
		bs, err := d.Loose(ctx)
		must(t, err)
		for _, b := range bs {
			ids = append(ids, b.ID)
		}
		return ids
	}
	if got := loose(); len(got) != 0 {
		t.Errorf("loose while a sandbox is of it: %v", got)
	}
	must(t, d.DropSandbox(ctx, "child", ""))
	if got := loose(); !slices.Equal(got, []string{"s1"}) {
		t.Errorf("loose: %v", got)
	}
	unnamed, err := snap("s4", "", DefaultTag)
	must(t, err)
	list, err := d.Snapshots(ctx, "blue", SnapshotFilter{Page: Page{Limit: 2}})
	must(t, err)
	if len(list) != 2 || list[0].Template.ID != unnamed || list[1].Tag.Name != "v2" || list[1].Origin != "i1" {
		t.Fatalf("snapshots %+v", list)
	}
	rest, err := d.Snapshots(ctx, "blue", SnapshotFilter{Origin: "i1", Page: Page{Limit: 2, After: list[1].Tag.AssignedAt, AfterID: list[1].Template.ID + ":" + list[1].Tag.Name}})
	must(t, err)
	if len(rest) != 1 || rest[0].Tag.Build != "s2" {
		t.Errorf("the rest is %+v", rest)
	}
	named, err := d.Snapshots(ctx, "blue", SnapshotFilter{Ref: &Ref{Name: "mine", Tag: "v2"}, Page: Page{Limit: 9}})
	must(t, err)
	if len(named) != 1 || named[0].Tag.Build != "s3" {
		t.Errorf("by name %+v", named)
	}
	if none, err := d.Snapshots(ctx, "default", SnapshotFilter{Page: Page{Limit: 9}}); err != nil || len(none) != 0 {
		t.Errorf("another team's: %+v, %v", none, err)
	}

	// What sandboxes are of isn't deleted, nor what is another team's.
	must(t, d.AddSandbox(ctx, row(Build{ID: "s3", Template: first}, "blue", "child2")))
	if err := d.DeleteTemplate(ctx, "blue", Ref{Name: "mine", Tag: "v2"}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("deleted in use: %v", err)
	}
	if err := d.DeleteTemplate(ctx, "default", Ref{Team: "blue", Name: "mine"}); !errdefs.IsNotFound(err) {
		t.Errorf("deleted by another team: %v", err)
	}
	must(t, d.DeleteTemplate(ctx, "blue", Ref{Name: "mine", Tag: DefaultTag}))
	if _, _, err := d.Resolve(ctx, "blue", Ref{Name: "mine"}); !errdefs.IsNotFound(err) {
		t.Errorf("resolved after its deletion: %v", err)
	}
	must(t, d.DropSandbox(ctx, "child2", ""))
	must(t, d.DeleteTemplate(ctx, "blue", Ref{Name: "mine", Tag: "v2"}))
	if _, err := d.Template(ctx, "blue", Ref{Name: "mine"}); !errdefs.IsNotFound(err) {
		t.Errorf("a template without tags: %v", err)
	}
	if got := loose(); !slices.Equal(got, []string{"s1", "s2", "s3"}) {
		t.Errorf("loose: %v", got)
	}
	for _, id := range loose() {
		must(t, d.DropBuild(ctx, id))
	}
	if err := d.AddSandbox(ctx, row(Build{ID: "s3", Template: first}, "blue", "late")); !errdefs.IsNotFound(err) {
		t.Errorf("a sandbox of a build that is no more: %v", err)
	}
}

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
	if err := d.AddSandbox(ctx, row(b, "blue", "i1")); !errdefs.IsAlreadyExists(err) {
		t.Errorf("the same id: %v", err)
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
	if n, err := d.Count(ctx, "default", "running"); err != nil || n != 6 {
		t.Errorf("%d run, %v", n, err)
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
	if got, err := d.Count(ctx, "", "paused"); err != nil || got != n {
		t.Errorf("%d rows, %v", got, err)
	}
}
