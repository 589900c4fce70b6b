package snapshot_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// paper is a machine that is nothing but what a save of it leaves.
type paper struct {
	vmm.Machine
	text string
}

const paperMiB = 4

func (p paper) Save(ctx context.Context, r vmm.SaveRequest) (*vmm.Saved, error) {
	if err := r.Quiesce.Freeze(ctx); err != nil {
		return nil, err
	}
	write := func(name string, size int64, at ...int64) error {
		f, err := os.Create(filepath.Join(r.Dir, name))
		if err != nil {
			return err
		}
		for _, off := range at {
			_, e := f.WriteAt([]byte(p.text+name), off)
			err = errors.Join(err, e)
		}
		return errors.Join(err, f.Truncate(size), f.Close())
	}
	err := errors.Join(
		write(vmm.StateFile, 16<<10, 0),
		write(vmm.MemoryFile, paperMiB<<20, 4096, 2<<20),
		write(vmm.DiskFile("root"), 3<<20, 1<<20),
		r.Quiesce.Thaw(ctx))
	return &vmm.Saved{
		Platform: vmm.Platform{Board: 4, QEMU: "q", Guest: "g", Accel: "tcg", CPU: "max", TSCKHz: 2_400_000},
		Shape:    vmm.Shape{VCPUs: 1, MemoryMiB: paperMiB},
		Disks:    []vmm.SavedDisk{{Serial: "root", LUN: 1}, {Serial: "other", LUN: 2}}[:1],
		Frozen:   true,
		Memory:   memory.Written{Chunks: []int64{0, 2}},
	}, err
}

// shelf is a store for paper machines.
type shelf struct {
	*snapshot.Store
	cfg *config.Config
}

func newShelf(t testing.TB) *shelf {
	t.Helper()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = filepath.Join(dir, "state"), filepath.Join(dir, "run")
	return &shelf{snapshot.New(cfg, slog.New(slog.DiscardHandler)), cfg}
}

func (s *shelf) save(t testing.TB, id string) *snapshot.Info {
	t.Helper()
	info, err := s.Save(t.Context(), id, paper{text: id}, &rest{})
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func (s *shelf) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.SnapshotDir()}, elem...)...)
}

// use opens a snapshot and reads all of it.
func (s *shelf) use(t testing.TB, id string) error {
	t.Helper()
	o, err := s.Open(id, "test")
	if err != nil {
		return err
	}
	held, err := o.Hold(t.Context())
	if err == nil {
		err = held.Release()
	}
	return errors.Join(err, o.Close())
}

func TestStore(t *testing.T) {
	s := newShelf(t)
	info := s.save(t, "one")
	if info.Shape.MemoryMiB != paperMiB || !info.Frozen || len(info.Disks) != 1 || info.Disks[0].File.Size != 3<<20 || len(info.Memory.Digests) != 2 {
		t.Errorf("%+v", info)
	}
	again, err := s.Inspect("one")
	if a, b := encode(t, again), encode(t, *info); err != nil || a != b {
		t.Errorf("%s\n%s, %v", a, b, err)
	}
	if _, err := s.Save(t.Context(), "one", paper{}, &rest{}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("twice: %v", err)
	}
	for _, id := range []string{"", ".", "..", ".tmp-x", "a/b", "-a", strings.Repeat("x", 77)} {
		_, saved := s.Save(t.Context(), id, paper{}, &rest{})
		_, opened := s.Open(id, "test")
		_, deleted := s.Delete(id)
		if !errdefs.IsInvalidArgument(saved) || !errdefs.IsInvalidArgument(opened) || !errdefs.IsInvalidArgument(deleted) {
			t.Errorf("%q: %v, %v, %v", id, saved, opened, deleted)
		}
	}
	if err := s.use(t, "one"); err != nil {
		t.Error(err)
	}
	for name, err := range map[string]error{
		"open":   second(s.Open("none", "test")),
		"look":   second(s.Inspect("none")),
		"delete": second(s.Delete("none")),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.WriteFile(s.path("one", "snapshot.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.save(t, "two")
	all, err := s.List()
	if err != nil || len(all) != 2 || all[0].Damage == "" || all[1].ID != "two" || all[1].Damage != "" {
		t.Errorf("%+v, %v", all, err)
	}
	if _, err := s.Delete("one"); err != nil { // whatever state it is in
		t.Error(err)
	}
}

func second[T any](_ T, err error) error { return err }

func encode(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// What isn't what was saved is found, and not by its size alone.
func TestDamaged(t *testing.T) {
	patch := func(name string, at int64, text string) func(dir string) error {
		return func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte(text), at)
			return errors.Join(err, f.Close())
		}
	}
	describe := func(change func(m map[string]any)) func(string) error {
		return func(dir string) error { return forge(filepath.Join(dir, "snapshot.json"), change) }
	}
	disk := func(m map[string]any) map[string]any { return m["disks"].([]any)[0].(map[string]any) }
	for name, tc := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"memory, in data":   {patch("memory", 4097, "x"), "memory is damaged in its MiB 0"},
		"memory, in a hole": {patch("memory", 1<<20, "x"), "memory is damaged in its MiB 1"},
		"memory cut short":  {func(dir string) error { return os.Truncate(dir+"/memory", paperMiB<<20-4096) }, "memory has 4190208 bytes"},
		"memory emptied": {func(dir string) error {
			return errors.Join(os.Truncate(dir+"/memory", 0), os.Truncate(dir+"/memory", paperMiB<<20))
		}, "memory is damaged in its MiB 0"},
		"no memory":      {func(dir string) error { return os.Remove(dir + "/memory") }, "memory"},
		"state":          {patch("state", 3, "x"), "state is damaged in its MiB 0"},
		"state grown":    {patch("state", 20<<10, "x"), "state has"},
		"disk":           {patch("disk-root", 2<<20, "x"), "disk-root is damaged in its MiB 2"},
		"disk cut short": {func(dir string) error { return os.Truncate(dir+"/disk-root", 1<<20) }, "disk-root has"},
		"a link": {func(dir string) error {
			return errors.Join(os.Remove(dir+"/state"), os.Symlink("/dev/zero", dir+"/state"))
		}, "state is not a file"},
		"a pipe":           {func(dir string) error { return errors.Join(os.Remove(dir+"/state"), unix.Mkfifo(dir+"/state", 0o600)) }, "state is not a file"},
		"another's memory": {func(dir string) error { return os.Rename(filepath.Dir(dir)+"/foreign/memory", dir+"/memory") }, "memory is damaged in its MiB 0"},
		"another's all": {func(dir string) error {
			return errors.Join(os.RemoveAll(dir), os.Rename(filepath.Dir(dir)+"/foreign", dir))
		}, `it is snapshot "foreign"`},
		"no description":       {func(dir string) error { return os.Remove(dir + "/snapshot.json") }, "snapshot.json"},
		"no JSON":              {patch("snapshot.json", 0, "}"), "snapshot.json"},
		"a bit in it":          {patch("snapshot.json", 120, "\x00"), "snapshot.json"},
		"another format":       {describe(func(m map[string]any) { m["format"] = 9 }), "it has format 9"},
		"what isn't known":     {describe(func(m map[string]any) { m["more"] = 1 }), "unknown field"},
		"another shape":        {describe(func(m map[string]any) { m["shape"] = map[string]int{"VCPUs": 1, "MemoryMiB": 8} }), "its memory has"},
		"no vCPUs":             {describe(func(m map[string]any) { m["shape"] = map[string]int{"VCPUs": 0, "MemoryMiB": 4} }), "it has 0 vCPU"},
		"a path":               {describe(func(m map[string]any) { disk(m)["serial"] = "../x" }), "its disk"},
		"a path as QEMU":       {describe(func(m map[string]any) { m["platform"].(map[string]any)["qemu"] = ".." }), "it names the artefacts"},
		"a disk twice":         {describe(func(m map[string]any) { m["disks"] = []any{disk(m), disk(m)} }), "its disk"},
		"a disk without image": {describe(func(m map[string]any) { disk(m)["file"] = nil }), "its disk root has 0 bytes"},
		"no digests":           {describe(func(m map[string]any) { delete(m["memory"].(map[string]any), "digests") }), "no digests"},
		"an endless state":     {describe(func(m map[string]any) { m["state"].(map[string]any)["size"] = 1 << 40 }), "its state has"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShelf(t)
			s.save(t, "good")
			s.save(t, "foreign")
			if err := s.use(t, "good"); err != nil {
				t.Fatal(err)
			}
			if err := tc.spoil(s.path("good")); err != nil {
				t.Fatal(err)
			}
			err := s.use(t, "good")
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v, want %q", err, tc.want)
			}
			if !errdefs.IsDataLoss(err) && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("the kind of %v", err)
			}
			if users, err := s.Users("good"); err != nil || len(users) != 0 {
				t.Errorf("users %v, %v", users, err)
			}
			if _, err := s.Delete("good"); err != nil {
				t.Error(err)
			}
		})
	}
}

// forge changes a description and signs it again.
func forge(path string, change func(m map[string]any)) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var outer map[string]json.RawMessage
	var m map[string]any
	d := func(b []byte, v any) error {
		dec := json.NewDecoder(bytes.NewReader(b))
		dec.UseNumber()
		return dec.Decode(v)
	}
	if err := errors.Join(d(b, &outer)); err != nil {
		return err
	}
	if err := d(outer["snapshot"], &m); err != nil {
		return err
	}
	change(m)
	if outer["snapshot"], err = json.Marshal(m); err != nil {
		return err
	}
	outer["sha256"] = json.RawMessage(`"` + snapshot.Sum(outer["snapshot"]) + `"`)
	if b, err = json.Marshal(outer); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// A file is read once, and again when it has been written to or the host has started anew.
func TestCheckedOncePerBoot(t *testing.T) {
	s := newShelf(t)
	s.save(t, "one")
	path := filepath.Join(s.cfg.RunDir, "snapshots", "checked", "one")
	remembered := func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	known := remembered()
	for _, name := range []string{"memory", "disk-root"} { // from the save on
		if !strings.Contains(known, `"`+name+`"`) {
			t.Errorf("%s is not known: %s", name, known)
		}
	}
	if err := s.use(t, "one"); err != nil || remembered() != known {
		t.Errorf("%s, %v", remembered(), err)
	}
	other := strings.Replace(known, `"boot":"`, `"boot":"x`, 1)
	if err := os.WriteFile(path, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.use(t, "one"); err != nil || strings.Contains(remembered(), `"x`) || !strings.Contains(remembered(), `"memory"`) || !strings.Contains(remembered(), `"disk-root"`) {
		t.Errorf("%s, %v", remembered(), err)
	}
	if _, err := s.Delete("one"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what was checked is remembered: %v", err)
	}
}

func TestCompatible(t *testing.T) {
	host := vmm.Platform{Board: 4, QEMU: "q", Guest: "another", Accel: "tcg", CPU: "max", TSCKHz: 2_400_500}
	info := newShelf(t).save(t, "one")
	if err := info.Compatible(host); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(p *vmm.Platform){
		"board version 4, but here is 5":    func(p *vmm.Platform) { p.Board = 5 },
		"QEMU q, but here is r":             func(p *vmm.Platform) { p.QEMU = "r" },
		"accelerator tcg, but here is kvm":  func(p *vmm.Platform) { p.Accel = "kvm" },
		"CPU max, but here is host:1":       func(p *vmm.Platform) { p.CPU = "host:1" },
		"2400000 kHz, but here are 2401000": func(p *vmm.Platform) { p.TSCKHz = 2_401_000 },
	} {
		other := host
		change(&other)
		if err := info.Compatible(other); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// Who uses a snapshot is known until it is over, however it ends; and so long its space isn't free, although it is deleted.
func TestUsers(t *testing.T) {
	s := newShelf(t)
	s.save(t, "one")
	o, err := s.Open("one", "here")
	if err != nil {
		t.Fatal(err)
	}
	cmd := helper(t, s.cfg, "use")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has it open
		t.Fatal(err)
	}
	users, err := s.Delete("one")
	want := []snapshot.User{{Name: "here", PID: os.Getpid()}, {Name: "there", PID: cmd.Process.Pid}}
	if err != nil || !slices.Equal(users, want) {
		t.Errorf("users %v, want %v, %v", users, want, err)
	}
	if _, err := s.Open("one", "late"); !errdefs.IsNotFound(err) {
		t.Errorf("got %v", err)
	}
	held, err := o.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(held.Release(), o.Close(), cmd.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left, err := s.Lingering(); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(s.cfg.RunDir, "snapshots", "*", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// helperEnv makes the test binary a process that works on the store of a configuration.
const helperEnv = "CUBE_TEST_SNAPSHOT"

func helper(t *testing.T, cfg *config.Config, what string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestHelper$")
	cmd.Env = append(os.Environ(), helperEnv+"="+what, "CUBE_TEST_CONFIG="+encode(t, cfg))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// TestHelper is that process.
func TestHelper(t *testing.T) {
	what := os.Getenv(helperEnv)
	if what == "" {
		t.Skip("for other tests")
	}
	var cfg config.Config
	if err := json.Unmarshal([]byte(os.Getenv("CUBE_TEST_CONFIG")), &cfg); err != nil {
		t.Fatal(err)
	}
	s := &shelf{snapshot.New(&cfg, slog.New(slog.DiscardHandler)), &cfg}
	die := func(p string) {
		if p == what {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	*snapshot.Killpoint = die
	switch what {
	case "use":
		o, err := s.Open("one", "there")
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		fmt.Println("open")
		select {}
	case "hidden":
		_, err := s.Delete("old")
		t.Fatal("not killed", err)
	}
	_, err := s.Save(t.Context(), "new", paper{text: "new"}, &rest{freeze: func(context.Context) error { die("frozen"); return nil }})
	t.Fatal("not killed", err)
}

// Whatever step the saving or deleting process is killed at, there is the old or the new, whole.
func TestProcessKilled(t *testing.T) {
	for point, want := range map[string][]string{
		"frozen":    {"old"},
		"saved":     {"old"},
		"described": {"old"},
		"published": {"new", "old"},
		"hidden":    nil,
	} {
		t.Run(point, func(t *testing.T) {
			s := newShelf(t)
			s.save(t, "old")
			err := helper(t, s.cfg, point).Run()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("not killed: %v", err)
			}
			all, err := s.List()
			if err != nil {
				t.Fatal(err)
			}
			var have []string
			for _, i := range all {
				have = append(have, i.ID)
				if err := s.use(t, i.ID); err != nil {
					t.Error(err)
				}
			}
			if !slices.Equal(have, want) {
				t.Errorf("there are %v, want %v", have, want)
			}
			if err := s.Sweep(); err != nil {
				t.Error(err)
			}
			entries, err := os.ReadDir(s.path())
			if err != nil || len(entries) != len(want) {
				t.Errorf("left: %v, %v", entries, err)
			}
		})
	}
}

// A sweep leaves alone what is being made, and saves, uses and deletions of the same names don't get into each other's way.
func TestTogether(t *testing.T) {
	s := newShelf(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 10 {
				id := fmt.Sprint("s", (i+n)%3)
				_, err := s.Save(t.Context(), id, paper{text: id}, &rest{})
				if err != nil && !errdefs.IsAlreadyExists(err) {
					t.Error(err)
				}
				if err := s.use(t, id); err != nil && !errdefs.IsNotFound(err) {
					t.Error(err)
				}
				if _, err := s.Delete(id); err != nil && !errdefs.IsNotFound(err) {
					t.Error(err)
				}
				if err := s.Sweep(); err != nil {
					t.Error(err)
				}
				if _, err := s.List(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := s.Sweep(); err != nil {
		t.Error(err)
	}
	left, _ := filepath.Glob(filepath.Join(s.cfg.RunDir, "snapshots", "*", "*"))
	if entries, err := os.ReadDir(s.path()); err != nil || len(entries)+len(left) != 0 {
		t.Errorf("left: %v, %v, %v", entries, left, err)
	}
}
