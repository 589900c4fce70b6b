package record

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func newPod(t *testing.T) Pod {
	t.Helper()
	p := Pod(filepath.Join(t.TempDir(), "pods", "0123456789abcdef"))
	unlock, err := p.Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	return p
}

func newBundle(t *testing.T) Bundle {
	t.Helper()
	return Bundle(t.TempDir())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRecordsAreReadBack(t *testing.T) {
	p, b := newPod(t), newBundle(t)
	if _, err := b.State(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("state of nothing: %v", err)
	}
	if _, err := b.Pod(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("pod of nothing: %v", err)
	}
	for range 2 { // the second time in place of the first
		must(t, b.SaveState(State{ID: "a", PID: 7}))
		must(t, b.SaveExit(Exit{PID: 7, Status: 3, At: time.Unix(1, 0)}))
		must(t, p.SaveState(PodState{ID: "pod", MachineDir: "/m"}))
		must(t, p.SaveAddress("unix:///s"))
		must(t, p.Join("a", b))
	}
	s, err := b.State()
	must(t, err)
	e, err := b.Exit()
	must(t, err)
	ps, err := p.State()
	must(t, err)
	address, err := p.Address()
	must(t, err)
	own, err := b.Pod()
	must(t, err)
	if s.PID != 7 || e.Status != 3 || ps.MachineDir != "/m" || address != "unix:///s" || own != p {
		t.Errorf("%+v %+v %+v %s %s", s, e, ps, address, own)
	}
	file, err := p.SaveConfig("a", []byte("x"))
	must(t, err)
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	must(t, os.RemoveAll(string(b)))
	if err := b.SaveExit(Exit{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("exit of a bundle that is gone: %v", err)
	}
}

// TestMembers: a container counts from its start until it says that it is undone, or its bundle is gone.
func TestMembers(t *testing.T) {
	p := newPod(t)
	another := Pod(filepath.Join(filepath.Dir(string(p)), "another"))
	must(t, os.Mkdir(string(another), 0o700))
	for id, prepare := range map[string]func(b Bundle) error{
		"started": func(Bundle) error { return nil },
		"created": func(b Bundle) error { return b.SaveState(State{ID: "created"}) },
		"damaged": func(b Bundle) error { return os.WriteFile(b.path("state.json"), []byte("{"), 0o600) },
		"undone":  func(b Bundle) error { return b.SaveState(State{ID: "undone", Undone: true}) },
		"removed": func(b Bundle) error { return os.RemoveAll(string(b)) },
		"moved":   func(b Bundle) error { return another.Join("moved", b) },
		"left":    func(Bundle) error { return p.Leave("left") },
	} {
		b := newBundle(t)
		must(t, p.Join(id, b))
		must(t, prepare(b))
	}
	ids, err := p.Members()
	must(t, err)
	slices.Sort(ids)
	if want := []string{"created", "damaged", "started"}; !slices.Equal(ids, want) {
		t.Errorf("members %q, want %q", ids, want)
	}
	ids, err = p.Others("damaged")
	must(t, err)
	slices.Sort(ids)
	if want := []string{"created", "started"}; !slices.Equal(ids, want) {
		t.Errorf("others %q, want %q", ids, want)
	}
	must(t, p.Leave("left")) // again
}

func TestDiscard(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(t *testing.T, p Pod) error
		stays   bool
	}{
		"nothing": {func(*testing.T, Pod) error { return nil }, false},
		"started": {func(_ *testing.T, p Pod) error { return p.SaveState(PodState{ID: "pod"}) }, false},
		"machine": {func(_ *testing.T, p Pod) error { return p.SaveState(PodState{ID: "pod", MachineDir: "/m"}) }, true},
		"undone": {func(_ *testing.T, p Pod) error {
			return p.SaveState(PodState{ID: "pod", MachineDir: "/m", Undone: true})
		}, false},
		"container": {func(t *testing.T, p Pod) error { return p.Join("a", newBundle(t)) }, true},
		"damaged":   {func(_ *testing.T, p Pod) error { return os.WriteFile(p.path("state.json"), []byte("{"), 0o600) }, true},
	} {
		p := newPod(t)
		must(t, c.prepare(t, p))
		err := p.Discard()
		if _, gone := os.Stat(string(p)); (gone == nil) != c.stays || (err != nil) != (name == "damaged") {
			t.Errorf("%s: %v, %v", name, err, gone)
		}
	}
}

// TestMakeAgainstDiscard: whoever has the lock has that of the directory that is there.
func TestMakeAgainstDiscard(t *testing.T) {
	p := newPod(t)
	var wg sync.WaitGroup
	var holders atomic.Int32
	for range 8 {
		wg.Go(func() {
			for range 50 {
				unlock, err := p.Make(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d have the lock", n)
				}
				holders.Add(-1) // whoever finds no directory makes another one
				if err := p.Discard(); err != nil {
					t.Error(err)
				}
				unlock()
			}
		})
	}
	wg.Wait()
}

func TestShimLock(t *testing.T) {
	p := newPod(t)
	lock, err := p.LockShim()
	must(t, err)
	if _, err := p.LockShim(); !errors.Is(err, ErrAlive) {
		t.Errorf("second lock: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.AwaitShim(ctx); !errors.Is(err, ErrAlive) {
		t.Errorf("wait for a living shim: %v", err)
	}
	// A pid that can't be one is never killed.
	must(t, WritePID(lock, 0))
	if _, err := p.KillShim(t.Context(), time.Millisecond); !errors.Is(err, ErrAlive) {
		t.Errorf("kill: %v", err)
	}
	lock.Close()
	must(t, p.AwaitShim(t.Context()))
}
