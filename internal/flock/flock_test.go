package flock

import (
	"context"
	"errors"
	"io/fs"
	"os"
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
	if _, err := TryLockDir(dir); !errors.Is(err, ErrLocked) {
		t.Fatalf("at once while shared: %v", err)
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

// TestLockOfARemovedDir: whoever waits for the lock of a directory that is removed and made anew gets the new one's.
func TestLockOfARemovedDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	old, err := LockDir(t.Context(), dir, false)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		unlock, err := LockDir(context.Background(), dir, false)
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			defer cancel()
			if _, err := LockDir(ctx, dir, false); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the new directory isn't locked: %v", err)
			}
			unlock()
		}
		got <- err
	}()
	time.Sleep(20 * time.Millisecond) // for it to wait; otherwise the test proves less
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	old()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}
