package pod

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/shim/record"
)

// TestForgotten: a pod without anything is forgotten only when no container of it has, or is about to have, anything.
func TestForgotten(t *testing.T) {
	dir, bundle := record.Pod(filepath.Join(t.TempDir(), "pod")), record.Bundle(t.TempDir())
	unlock, err := dir.Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	if err := dir.Join("announced", bundle); err != nil {
		t.Fatal(err)
	}
	begin := func() (p *Pod, forgotten <-chan bool) {
		p = New(Env{ID: "pod", Dir: dir, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
		ch := make(chan bool, 1)
		go func() {
			hidden := false
			forgot := p.AwaitForgotten(time.Millisecond, func() { hidden = true })
			if forgot != hidden {
				t.Errorf("forgotten: %v, hidden: %v", forgot, hidden)
			}
			ch <- forgot
		}()
		return p, ch
	}
	is := func(forgotten <-chan bool, want bool) {
		t.Helper()
		select {
		case got := <-forgotten:
			if got != want {
				t.Errorf("forgotten: %v", got)
			}
		case <-time.After(10 * time.Second):
			t.Error("AwaitForgotten goes on")
		}
	}

	p, forgotten := begin()
	select {
	case <-forgotten:
		t.Error("a container has been announced")
	case <-time.After(50 * time.Millisecond): // long enough for many looks
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	is(forgotten, false)

	p, forgotten = begin()
	if err := p.reserve("announced"); err != nil {
		t.Fatal(err)
	}
	if err := bundle.SaveState(record.State{ID: "announced", Undone: true}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-forgotten:
		t.Error("a container is being made")
	case <-time.After(50 * time.Millisecond):
	}
	p.forget("announced")
	is(forgotten, true)
	if _, err := os.Stat(string(dir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the pod's directory is left: %v", err)
	}
}

// TestAnswering: a shim goes on while one deletion hasn't been answered, and ends for the next one.
func TestAnswering(t *testing.T) {
	dir := record.Pod(filepath.Join(t.TempDir(), "pod"))
	unlock, err := dir.Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	p := New(Env{ID: "pod", Dir: dir, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	done := p.Answer()
	if p.Retire(t.Context(), "pod", func() {}) {
		t.Error("it ends before it has answered")
	}
	done()
	if !p.Retire(t.Context(), "pod", func() {}) {
		t.Error("it goes on")
	}
}
