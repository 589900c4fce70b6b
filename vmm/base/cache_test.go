package base

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/memory"
)

const khz = 2_400_000

// kit is a cache whose snapshots are files without a machine behind them.
type kit struct {
	*cache
	built atomic.Int32
}

func newKit(t *testing.T, max int) *kit {
	t.Helper()
	dir := t.TempDir()
	return &kit{cache: &cache{
		dir:  filepath.Join(dir, "base"),
		max:  max,
		pool: memory.NewPool(filepath.Join(dir, "pool")),
		log:  slog.New(slog.DiscardHandler),
	}}
}

func testKey(mib int) Key {
	return Key{Format: formatVersion, QEMU: "q", Guest: "g", Accel: accel.TCG, CPU: "max", Shape: vmm.Shape{VCPUs: 1, MemoryMiB: mib}}
}

// build writes what a saved machine would leave.
func (k *kit) build(key Key, tsc int) func(context.Context, string) error {
	return func(_ context.Context, dir string) (err error) {
		k.built.Add(1)
		d := description{Key: key, TSCKHz: tsc}
		if d.State.Size, err = writeFile(filepath.Join(dir, stateFile), func(f *os.File) error {
			if _, err := f.Write(bytes.Repeat([]byte("state"), 1000)); err != nil {
				return err
			}
			d.State.Digest, err = sha256Of(f)
			return err
		}); err != nil {
			return err
		}
		size := int64(key.Shape.MemoryMiB) << 20
		mem, err := memory.Scratch(size)
		if err != nil {
			return err
		}
		defer mem.Close()
		for off := int64(0); off < size; off += 1 << 20 {
			if _, err := fmt.Fprintf(newOffsetWriter(mem, off), "page at %d, build %d", off, k.built.Load()); err != nil {
				return err
			}
		}
		if d.Memory.Size, err = writeFile(filepath.Join(dir, memoryFile), func(f *os.File) (err error) {
			d.Memory.Digests, err = memory.Copy(f, mem, size)
			return err
		}); err != nil {
			return err
		}
		_, err = writeFile(filepath.Join(dir, descFile), func(f *os.File) error {
			return json.NewEncoder(f).Encode(d)
		})
		return err
	}
}

type offsetWriter struct {
	f   *os.File
	off int64
}

func newOffsetWriter(f *os.File, off int64) offsetWriter { return offsetWriter{f, off} }

func (w offsetWriter) Write(b []byte) (int, error) { return w.f.WriteAt(b, w.off) }

func (k *kit) must(t *testing.T, key Key) *ready {
	t.Helper()
	r, err := k.get(t.Context(), key, khz, k.build(key, khz))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// names lists what is in the cache's directory, but for the lock.
func (k *kit) names(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != lockFile {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestBuiltOnce(t *testing.T) {
	k := newKit(t, 2)
	key := testKey(4)
	var wg sync.WaitGroup
	for range 8 { // as many processes would: they share nothing but directories
		wg.Go(func() {
			r, err := k.get(t.Context(), key, khz, k.build(key, khz))
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			if d, err := memory.Digest(r.held.File, r.Memory.Size); err != nil || !maps.Equal(d, r.Memory.Digests) {
				t.Errorf("memory %s, %v", d, err)
			}
		})
	}
	wg.Wait()
	if n := k.built.Load(); n != 1 {
		t.Errorf("built %d times", n)
	}
	if k.pool.InUse(key.ID()) {
		t.Error("in use by nobody")
	}
}

// A snapshot that isn't what it should be is never restored, but made again.
func TestUnusable(t *testing.T) {
	edit := func(name string, change func([]byte) []byte) func(string) error {
		return func(dir string) error {
			path := filepath.Join(dir, name)
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(path, change(b), 0o600)
		}
	}
	describe := func(change func(*description)) func(string) error {
		return edit(descFile, func(b []byte) []byte {
			var d description
			if err := json.Unmarshal(b, &d); err != nil {
				panic(err)
			}
			change(&d)
			b, _ = json.Marshal(d)
			return b
		})
	}
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	for name, spoil := range map[string]func(dir string) error{
		"no description":          func(dir string) error { return os.Remove(filepath.Join(dir, descFile)) },
		"no state":                func(dir string) error { return os.Remove(filepath.Join(dir, stateFile)) },
		"no memory":               func(dir string) error { return os.Remove(filepath.Join(dir, memoryFile)) },
		"an empty directory":      func(dir string) error { return errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)) },
		"a file in its place":     func(dir string) error { return errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)) },
		"garbage as description":  edit(descFile, func([]byte) []byte { return []byte("{") }),
		"a huge description":      edit(descFile, func(b []byte) []byte { return append(bytes.Repeat([]byte(" "), maxDesc), b...) }),
		"a description cut short": edit(descFile, func(b []byte) []byte { return b[:len(b)/2] }),
		"a bit of the state":      edit(stateFile, flip),
		"a state cut short":       edit(stateFile, func(b []byte) []byte { return b[:100] }),
		"an empty state":          edit(stateFile, func([]byte) []byte { return nil }),
		"a bit of the memory":     edit(memoryFile, func(b []byte) []byte { b[3<<20] ^= 1; return b }),
		"a page where none was":   edit(memoryFile, func(b []byte) []byte { b[1<<20+512<<10] = 1; return b }),
		"a memory cut short":      edit(memoryFile, func(b []byte) []byte { return b[:len(b)-4096] }),
		"a memory too long":       edit(memoryFile, func(b []byte) []byte { return append(b, 0) }),
		"zeroed memory":           edit(memoryFile, func(b []byte) []byte { return make([]byte, len(b)) }),
		"another machine's": describe(func(d *description) {
			d.Key.QEMU = "other"
		}),
		"another format":          describe(func(d *description) { d.Key.Format++ }),
		"no digests":              describe(func(d *description) { d.State.Digest, d.Memory.Digests = "", nil }),
		"a path as digest":        describe(func(d *description) { d.State.Digest = strings.Repeat("../", 20) }),
		"another size of memory":  describe(func(d *description) { d.Memory.Size *= 2 }),
		"a host with another TSC": describe(func(d *description) { d.TSCKHz = khz + khz/1000 }),
		"memory behind a link": func(dir string) error {
			path := filepath.Join(dir, memoryFile)
			return errors.Join(os.Rename(path, path+"2"), os.Symlink(memoryFile+"2", path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t, 2)
			key := testKey(4)
			if err := k.must(t, key).Close(); err != nil {
				t.Fatal(err)
			}
			if err := spoil(filepath.Join(k.dir, key.ID())); err != nil {
				t.Fatal(err)
			}
			r := k.must(t, key)
			if n := k.built.Load(); n != 2 {
				t.Errorf("built %d times", n)
			}
			if d, err := memory.Digest(r.held.File, r.Memory.Size); err != nil || !maps.Equal(d, r.Memory.Digests) || r.TSCKHz != khz {
				t.Errorf("memory %s, %v", d, err)
			}
			if names := k.names(t); len(names) != 1 {
				t.Errorf("the cache holds %v", names)
			}
		})
	}
}

func TestTSCTolerance(t *testing.T) {
	k := newKit(t, 2)
	key := testKey(2)
	k.must(t, key)
	for ppm, usable := range map[int]bool{-200: true, 200: true, -300: false, 300: false} {
		_, err := k.find(t.Context(), key, khz+khz*ppm/1_000_000)
		if usable != (err == nil) || !usable && !errors.Is(err, errUnusable) {
			t.Errorf("%d ppm: %v", ppm, err)
		}
	}
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	k := newKit(t, 2)
	key := testKey(2)
	boom := errors.New("boom")
	_, err := k.get(t.Context(), key, khz, func(ctx context.Context, dir string) error {
		return errors.Join(boom, os.WriteFile(filepath.Join(dir, memoryFile), []byte("half"), 0o600))
	})
	if !errors.Is(err, boom) {
		t.Fatalf("got %v", err)
	}
	if names := k.names(t); len(names) != 0 {
		t.Errorf("left: %v", names)
	}
	// A build that says it is done but isn't.
	if _, err := k.get(t.Context(), key, khz, func(context.Context, string) error { return nil }); !errors.Is(err, errUnusable) {
		t.Errorf("got %v", err)
	}
	k.must(t, key)
}

func TestKilledBuildIsSwept(t *testing.T) {
	k := newKit(t, 2)
	left := filepath.Join(k.dir, tmpPrefix+"123")
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(left, memoryFile), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	key := testKey(2)
	k.must(t, key)
	if names := k.names(t); len(names) != 1 || names[0] != key.ID() {
		t.Errorf("the cache holds %v", names)
	}
}

func TestSweepLeavesTheBuilderAlone(t *testing.T) {
	k := newKit(t, 2)
	k.sweepIfIdle() // without a directory
	key := testKey(2)
	if _, err := k.get(t.Context(), key, khz, func(ctx context.Context, dir string) error {
		k.sweepIfIdle()
		return k.build(key, khz)(ctx, dir)
	}); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(k.dir, tmpPrefix+"123")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	k.sweepIfIdle()
	if names := k.names(t); len(names) != 1 || names[0] != key.ID() {
		t.Errorf("the cache holds %v", names)
	}
}

func TestHalfMade(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = t.TempDir(), t.TempDir()
	if left := HalfMade(cfg); len(left) != 0 {
		t.Errorf("without a directory: %v", left)
	}
	dir := filepath.Join(cfg.BaseDir(), tmpPrefix+"1")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	unlock, err := flock.TryLock(filepath.Join(cfg.BaseDir(), lockFile))
	if err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	RemoveHalfMade(cfg, quiet)
	if left := HalfMade(cfg); len(left) != 0 {
		t.Errorf("of one being made: %v", left)
	}
	unlock()
	if left := HalfMade(cfg); len(left) != 1 || left[0] != dir {
		t.Errorf("got %v, want %s", left, dir)
	}
	RemoveHalfMade(cfg, quiet)
	if left := HalfMade(cfg); len(left) != 0 {
		t.Errorf("after the removal: %v", left)
	}
}

func TestLeastRecentlyUsedGoes(t *testing.T) {
	k := newKit(t, 2)
	now := time.Now()
	use := func(mib, minutesAgo int) *ready {
		t.Helper()
		key := testKey(mib)
		r := k.must(t, key)
		at := now.Add(-time.Duration(minutesAgo) * time.Minute)
		if err := os.Chtimes(filepath.Join(k.dir, key.ID(), descFile), at, at); err != nil {
			t.Fatal(err)
		}
		return r
	}
	has := func(mib int) bool {
		_, err := os.Stat(filepath.Join(k.dir, testKey(mib).ID(), descFile))
		return err == nil
	}
	use(1, 30).Close()
	use(2, 20).Close()
	use(1, 10).Close() // again
	held := use(3, 5)
	if !has(1) || has(2) || !has(3) {
		t.Fatalf("1: %v, 2: %v, 3: %v; want 2 gone", has(1), has(2), has(3))
	}
	// The one in use stays, although it is the oldest.
	at := now.Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(k.dir, testKey(3).ID(), descFile), at, at); err != nil {
		t.Fatal(err)
	}
	all := use(4, 1)
	if has(1) || !has(3) || !has(4) {
		t.Fatalf("1: %v, 3: %v, 4: %v; want 1 gone", has(1), has(3), has(4))
	}
	use(5, 0)
	if !has(3) || !has(4) || !has(5) {
		t.Fatalf("3: %v, 4: %v, 5: %v; all are in use", has(3), has(4), has(5))
	}
	if d, err := memory.Digest(held.held.File, held.Memory.Size); err != nil || !maps.Equal(d, held.Memory.Digests) {
		t.Errorf("a held memory has changed: %v", err)
	}
	all.Close()
}

func TestWaitForBuilderEnds(t *testing.T) {
	k := newKit(t, 2)
	key := testKey(2)
	building, finish := make(chan struct{}), make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := k.get(context.Background(), key, khz, func(ctx context.Context, dir string) error {
			close(building)
			<-finish
			return k.build(key, khz)(ctx, dir)
		})
		done <- err
	}()
	<-building
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := k.get(ctx, key, khz, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(finish)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestRung(t *testing.T) {
	max := vmm.Shape{VCPUs: 6, MemoryMiB: 3000}
	for _, tc := range []struct{ asked, want vmm.Shape }{
		{vmm.Shape{VCPUs: 1, MemoryMiB: 1}, vmm.Shape{VCPUs: 1, MemoryMiB: 128}},
		{vmm.Shape{VCPUs: 1, MemoryMiB: 128}, vmm.Shape{VCPUs: 1, MemoryMiB: 128}},
		{vmm.Shape{VCPUs: 3, MemoryMiB: 257}, vmm.Shape{VCPUs: 4, MemoryMiB: 512}},
		{vmm.Shape{VCPUs: 5, MemoryMiB: 2100}, vmm.Shape{VCPUs: 6, MemoryMiB: 3000}},
		{max, max},
	} {
		if got, err := rung(tc.asked, max); err != nil || got != tc.want {
			t.Errorf("%v gives %v, %v; want %v", tc.asked, got, err, tc.want)
		}
	}
	for _, asked := range []vmm.Shape{{VCPUs: 0, MemoryMiB: 256}, {VCPUs: 7, MemoryMiB: 256}, {VCPUs: 1}, {VCPUs: 1, MemoryMiB: 3001}, {VCPUs: -1, MemoryMiB: -1}} {
		var limit *vmm.LimitError
		if _, err := rung(asked, max); !errors.As(err, &limit) || limit.Max == 0 {
			t.Errorf("%v: %v", asked, err)
		}
	}
	cfg := config.Default()
	got, err := limits(cfg)
	if err != nil || got.VCPUs < 1 || got.MemoryMiB < 128 {
		t.Errorf("the host's limits %v, %v", got, err)
	}
}

func TestKey(t *testing.T) {
	base := testKey(256)
	seen := map[string]bool{base.ID(): true}
	for _, change := range []func(*Key){
		func(k *Key) { k.Format++ },
		func(k *Key) { k.Board++ },
		func(k *Key) { k.QEMU = "x" },
		func(k *Key) { k.Guest = "x" },
		func(k *Key) { k.Accel = accel.KVM },
		func(k *Key) { k.CPU = "x" },
		func(k *Key) { k.Shape.VCPUs++ },
		func(k *Key) { k.Shape.MemoryMiB++ },
	} {
		k := base
		change(&k)
		if seen[k.ID()] {
			t.Errorf("%+v has the name of another", k)
		}
		seen[k.ID()] = true
	}
	if id, err := hostCPU("/proc/cpuinfo"); err != nil || len(id) != 16 {
		t.Errorf("host CPU %q, %v", id, err)
	}
}
