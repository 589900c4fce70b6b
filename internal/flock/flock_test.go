package flock

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"testing"
	"time"
)

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TryLock(path); !errors.Is(err, ErrLocked) {
		t.Fatalf("a second time: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := Lock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("waiting: %v", err)
	}
	got := make(chan error)
	go func() {
		unlock, err := Lock(context.Background(), path)
		if err == nil {
			unlock()
		}
		got <- err
	}()
	unlock()
	select {
	case err := <-got:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the lock was not handed over")
	}
	if _, err := TryLock(filepath.Join(path, "x")); err == nil || errors.Is(err, ErrLocked) {
		t.Fatalf("a path that can't be: %v", err)
	}
}

func TestLockDir(t *testing.T) {
	dir := t.TempDir()
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	one, err := LockDir(short(), dir, true)
	if err != nil {
		t.Fatal(err)
	}
	two, err := LockDir(short(), dir, true)
	if err != nil {
		t.Fatalf("a second one to share it: %v", err)
	}
	one()
	if _, err := LockDir(short(), dir, false); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("exclusive while shared: %v", err)
	}
	two()
	all, err := LockDir(context.Background(), dir, false) // the attempt before may have it for a moment
	if err != nil {
		t.Fatal(err)
	}
	if _, err := LockDir(short(), dir, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("shared while exclusive: %v", err)
	}
	all()
	if _, err := LockDir(short(), dir+"/none", true); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("no directory: %v", err)
	}
}
