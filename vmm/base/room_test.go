package base

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/qemu"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// small is a host with an XFS store of its own, two QEMUs and two guest images, the second of which are current.
type small struct {
	*testing.T
	cfg  *config.Config
	art  artefacts // current
	qemu [2]string // digests
}

func newSmall(t *testing.T) *small {
	t.Helper()
	s := &small{T: t, cfg: config.Default()}
	s.cfg.StateDir, s.cfg.RunDir = testfs.XFS(t, 512<<20), t.TempDir()
	s.cfg.Artefacts = filepath.Join(s.cfg.StateDir, "artefacts")
	s.must(os.MkdirAll(s.cfg.BaseDir(), 0o700))
	for n, content := range []string{"old", "new"} {
		for _, current := range []string{s.cfg.QEMUDir(), s.cfg.GuestDir()} {
			dir, err := artefact.Publish(filepath.Dir(current), func(dir string) error {
				return os.WriteFile(filepath.Join(dir, "f"), []byte(content), 0o644)
			})
			s.must(err)
			if current == s.cfg.QEMUDir() {
				s.qemu[n] = filepath.Base(dir)
			}
		}
	}
	var err error
	s.art, err = currentArtefacts(s.cfg)
	s.must(err)
	return s
}

func (s *small) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// base makes a base snapshot with 32 MiB of memory in use, last used that many hours ago.
func (s *small) base(mib, hours int, change func(*Key)) (name string) {
	s.Helper()
	key, err := newKey(s.art, accel.TCG, vmm.Shape{VCPUs: 1, MemoryMiB: mib})
	s.must(err)
	if change != nil {
		change(&key)
	}
	k := &kit{cache: newCache(s.cfg, slog.New(slog.DiscardHandler))}
	s.must(k.make(s.Context(), key, khz, k.build(key, khz)))
	dir := filepath.Join(s.cfg.BaseDir(), key.ID())
	testfs.Random(s, filepath.Join(dir, "ballast"), 32<<20)
	used := time.Now().Add(-time.Duration(hours) * time.Hour)
	s.must(os.Chtimes(filepath.Join(dir, descFile), used, used))
	return key.ID()
}

func (s *small) bases() (names []string) {
	s.Helper()
	kept, err := Kept(s.cfg)
	s.must(err)
	for _, k := range kept {
		names = append(names, k.Name)
	}
	return names
}

// TestMakeRoom: a store above its high watermark loses what wasn't used for longest, but for what is in use, until it is down
// to the low one; what can't be made room for is refused.
func TestMakeRoom(t *testing.T) {
	s := newSmall(t)
	oldest, old, newest := s.base(128, 3, nil), s.base(129, 2, nil), s.base(130, 1, nil)
	key, err := newKey(s.art, accel.TCG, vmm.Shape{VCPUs: 1, MemoryMiB: 128})
	s.must(err)
	held, err := newCache(s.cfg, slog.New(slog.DiscardHandler)).find(t.Context(), key, khz)
	s.must(err)
	defer held.Close()
	used := time.Now().Add(-3 * time.Hour)
	s.must(os.Chtimes(filepath.Join(s.cfg.BaseDir(), oldest, descFile), used, used))
	log := slog.New(slog.DiscardHandler)
	s.must(MakeRoom(t.Context(), s.cfg, log))
	if got := s.bases(); !slices.Equal(got, []string{oldest, old, newest}) {
		t.Fatalf("with room enough %v are left", got)
	}

	r, err := space.Of(s.cfg.StoreDir())
	s.must(err)
	inUse := int((r.Size - r.Free) * 100 / r.Size)
	s.cfg.Store.HighWatermark, s.cfg.Store.LowWatermark = inUse-1, inUse-2
	s.must(MakeRoom(t.Context(), s.cfg, log))
	if got := s.bases(); !slices.Equal(got, []string{oldest, newest}) {
		t.Errorf("%v are left, want the one in use and %s", got, newest)
	}
	s.cfg.Store.HighWatermark, s.cfg.Store.LowWatermark = 2, 1
	err = MakeRoom(t.Context(), s.cfg, log)
	if !errdefs.IsResourceExhausted(err) || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
	if got := s.bases(); !slices.Equal(got, []string{oldest}) {
		t.Errorf("%v are left, want the one in use", got)
	}
	if kept, err := artefact.List(filepath.Dir(s.cfg.QEMUDir())); err != nil || len(kept) != 1 || !kept[0].Current {
		t.Errorf("of QEMU %v are left, %v", kept, err)
	}
}

func TestStale(t *testing.T) {
	s := newSmall(t)
	fresh := s.base(128, 0, nil)
	want := map[string]string{
		s.base(129, 0, func(k *Key) { k.QEMU = s.qemu[0] }):      "QEMU",
		s.base(130, 0, func(k *Key) { k.Board++ }):               "version of cube",
		s.base(131, 0, func(k *Key) { k.CPU = "another" }):       "CPU",
		s.base(132, 0, func(k *Key) { k.Guest = "another one" }): "guest",
	}
	kept, err := Kept(s.cfg)
	s.must(err)
	if len(kept) != 5 {
		t.Errorf("kept: %v", kept)
	}
	for _, k := range kept {
		if !strings.Contains(k.Stale, want[k.Name]) || (k.Stale == "") != (k.Name == fresh) {
			t.Errorf("%s is stale: %q, want %q", k.Shape, k.Stale, want[k.Name])
		}
		if k.Stale == "" {
			continue
		}
		if gone, err := k.Remove(t.Context(), s.cfg); !gone || err != nil {
			t.Errorf("gone: %v, %v", gone, err)
		}
	}
	if got := s.bases(); !slices.Equal(got, []string{fresh}) {
		t.Errorf("left: %v", got)
	}
}

// stuffed is a machine that can be saved.
type stuffed struct {
	vmm.Machine
	platform vmm.Platform
}

func (m stuffed) Save(_ context.Context, r vmm.SaveRequest) (*vmm.Saved, error) {
	mem := filepath.Join(r.Dir, vmm.MemoryFile)
	return &vmm.Saved{Platform: m.platform, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 1}, Frozen: true}, errors.Join(
		os.WriteFile(filepath.Join(r.Dir, vmm.StateFile), []byte("state"), 0o600), os.WriteFile(mem, nil, 0o600), os.Truncate(mem, 1<<20))
}

// TestUnneeded: what a snapshot needs stays, another stack's too, and all does where that can't be told.
func TestUnneeded(t *testing.T) {
	s := newSmall(t)
	list := func(doomed string) (kinds []string) {
		t.Helper()
		all, err := Unneeded(s.cfg, func(id string) bool { return id == doomed })
		s.must(err)
		for _, a := range all {
			kinds = append(kinds, a.Kind)
		}
		return kinds
	}
	expect := func(got []string, want ...string) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("not needed: %v, want %v", got, want)
		}
	}
	expect(list(""), "qemu", "guest")
	before, err := Unneeded(s.cfg, func(string) bool { return false })
	s.must(err)

	save := func(cfg *config.Config, id string) *snapshot.Store {
		st := snapshot.New(cfg, slog.New(slog.DiscardHandler))
		_, err := st.Save(t.Context(), id, stuffed{platform: vmm.Platform{Board: qemu.BoardVersion, QEMU: s.qemu[0], Guest: "g"}}, nil, nil)
		s.must(err)
		return st
	}
	mine := save(s.cfg, "mine")
	expect(list(""), "guest")
	expect(list("mine"), "qemu", "guest")
	if gone, err := before[0].Remove(t.Context()); gone || err != nil {
		t.Errorf("what a snapshot needs by now is gone: %v, %v", gone, err)
	}
	if _, err := mine.Delete("mine"); err != nil {
		t.Error(err)
	}

	other := *s.cfg
	other.StateDir = t.TempDir()
	s.must(artefact.Register(s.cfg.Artefacts, other.StateDir))
	theirs := save(&other, "theirs")
	expect(list("theirs"), "guest")
	if _, err := theirs.Delete("theirs"); err != nil {
		t.Error(err)
	}
	expect(list(""), "qemu", "guest")
	s.must(os.WriteFile(other.StoreImage(), nil, 0o600))
	if _, err := Unneeded(s.cfg, func(string) bool { return false }); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("with a store that isn't mounted: %v", err)
	}
	s.must(os.Remove(other.StoreImage()))
	s.must(os.Mkdir(filepath.Join(s.cfg.SnapshotDir(), "broken"), 0o700))
	if _, err := Unneeded(s.cfg, func(string) bool { return false }); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "broken") {
		t.Errorf("with a snapshot that can't be read: %v", err)
	}

	s.must(os.Remove(filepath.Join(s.cfg.SnapshotDir(), "broken")))
	release, err := artefacts{qemu: filepath.Join(filepath.Dir(s.cfg.QEMUDir()), s.qemu[0]), guest: s.art.guest}.use(t.Context())
	s.must(err)
	expect(list(""), "guest")
	s.must(release())
	if gone, err := before[0].Remove(t.Context()); !gone || err != nil {
		t.Errorf("gone: %v, %v", gone, err)
	}
	if _, err := os.Stat(before[0].Dir); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
	expect(list(""), "guest")
}
