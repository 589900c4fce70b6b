package artefact

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func unneeded() (bool, error) { return false, nil }

func find(t *testing.T, parent, dir string) Kept {
	t.Helper()
	all, err := List(parent)
	if err != nil {
		t.Fatal(err)
	}
	n := slices.IndexFunc(all, func(k Kept) bool { return k.Dir == dir })
	if n < 0 {
		t.Fatalf("%s is not in %v", dir, all)
	}
	return all[n]
}

// An artefact goes only when it is neither current, nor used by anybody, nor needed, and whole.
func TestRemove(t *testing.T) {
	parent := t.TempDir()
	a, b := publish(t, parent, "a"), publish(t, parent, "b")
	if !find(t, parent, b).Current || find(t, parent, a).Current {
		t.Error("the current one isn't told")
	}
	release, err := Use(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	another, err := Use(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	another()
	old := find(t, parent, a)
	remove := func(k Kept, needed func() (bool, error), want bool) {
		t.Helper()
		if gone, err := k.Remove(t.Context(), needed); err != nil || gone != want {
			t.Errorf("gone: %v, %v", gone, err)
		}
		if _, err := os.Stat(k.Dir); errors.Is(err, fs.ErrNotExist) != want {
			t.Error(err)
		}
	}
	if !old.InUse() {
		t.Error("it isn't in use")
	}
	remove(old, unneeded, false)
	release()
	remove(old, func() (bool, error) { return true, nil }, false)
	remove(find(t, parent, b), unneeded, false)
	failure := errors.New("can't tell")
	if gone, err := old.Remove(t.Context(), func() (bool, error) { return false, failure }); gone || !errors.Is(err, failure) {
		t.Errorf("nobody knows whether it is needed, gone: %v, %v", gone, err)
	}
	// Nobody begins to use it while it is decided upon.
	remove(old, func() (bool, error) {
		if !old.InUse() {
			t.Error("it can be used meanwhile")
		}
		return false, nil
	}, true)
	if _, err := Use(t.Context(), a); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed one is used: %v", err)
	}
	if again := publish(t, parent, "a"); Verify(again) != nil {
		t.Error("it can't be made again")
	}
}

// What was used last goes last.
func TestListOrder(t *testing.T) {
	parent := t.TempDir()
	a, b, c := publish(t, parent, "a"), publish(t, parent, "b"), publish(t, parent, "c")
	release, err := Use(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	release()
	all, err := List(parent)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 3 || all[0].Dir != b || all[1].Dir != c || all[2].Dir != a {
		t.Errorf("got %v", all)
	}
	if all, err := List(filepath.Join(parent, "none")); err != nil || len(all) > 0 {
		t.Errorf("without a directory: %v, %v", all, err)
	}
}

func TestStacks(t *testing.T) {
	dir, one, two := t.TempDir(), t.TempDir(), t.TempDir()
	for _, s := range []string{one, two, one} {
		if err := Register(dir, s); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(two); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if all, err := Stacks(dir); err != nil || len(all) != 1 || all[0] != one {
			t.Errorf("got %v, %v", all, err)
		}
	}
}
