package db

import (
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

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
		if team, _, err := d.Authenticate(ctx, k); err != nil || team != want {
			t.Errorf("a key of %s: %q, %v", want, team, err)
		}
	}
	for _, k := range []string{"", "e2b_", key + "0", strings.ToUpper(key), KeyPrefix + strings.Repeat("0", 40), "' OR 1=1 --"} {
		if team, _, err := d.Authenticate(ctx, k); !errdefs.IsUnauthorized(err) {
			t.Errorf("%q: %q, %v", k, team, err)
		}
	}
	keys, err := d.Keys(ctx)
	must(t, err)
	if len(keys) != 2 || keys[0].Team != DefaultTeam || keys[0].UsedAt.IsZero() || !strings.HasPrefix(key, KeyPrefix+keys[0].Prefix) || !strings.HasSuffix(key, keys[0].Suffix) {
		t.Errorf("keys %+v", keys)
	}
	d.uses = lastUses{}
	_, err = d.write.Exec("PRAGMA query_only = 1") // as if the disk were full
	must(t, err)
	if team, _, err := d.Authenticate(ctx, other); err != nil || team != "blue" {
		t.Errorf("where nothing can be written: %q, %v", team, err)
	}
	_, err = d.write.Exec("PRAGMA query_only = 0")
	must(t, err)
	must(t, d.RevokeKey(ctx, keys[0].ID))
	must(t, d.RevokeKey(ctx, other))
	for _, k := range []string{key, other} {
		if _, _, err := d.Authenticate(ctx, k); !errdefs.IsUnauthorized(err) {
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
