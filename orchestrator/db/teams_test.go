package db

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestDropTeam: what was a team's is in no file, or who has asked is told that it is.
func TestDropTeam(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, "default", "base")
	marked := func() bool {
		t.Helper()
		for _, suffix := range []string{"", "-wal"} {
			text, err := os.ReadFile(d.path + suffix)
			must(t, err)
			if bytes.Contains(text, []byte("verysecretvalue")) {
				return true
			}
		}
		return false
	}
	begin := func(team string) {
		t.Helper()
		_, err := d.CreateKey(ctx, team)
		must(t, err)
		s := row(b, team, "i-"+team)
		s.Spec = []byte(`{"env": "` + strings.Repeat("verysecretvalue", 1000) + `"}`)
		must(t, d.AddSandbox(ctx, s))
		if !marked() {
			t.Error("it is nowhere")
		}
		must(t, d.DropSandbox(ctx, s.ID, ""))
	}
	begin("blue")
	must(t, d.DropTeam(ctx, "blue"))
	if marked() {
		t.Error("it is still in a file")
	}
	begin("red")
	_, err := d.write.Exec("PRAGMA busy_timeout = 1")
	must(t, err)
	reads, err := d.read.Begin()
	must(t, err)
	defer reads.Rollback()
	var n int
	must(t, reads.QueryRow("SELECT count(*) FROM teams").Scan(&n))
	if err := d.DropTeam(ctx, "red"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "team red is gone, but") {
		t.Errorf("while somebody reads: %v", err)
	}
}
