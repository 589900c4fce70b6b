package snapshot_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/vmm"
)

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
	if _, err := s.Save(t.Context(), "one", paper{}, &rest{}, nil); !errdefs.IsAlreadyExists(err) {
		t.Errorf("twice: %v", err)
	}
	for _, id := range []string{"", ".", "..", ".tmp-x", "a/b", "-a", strings.Repeat("x", 77)} {
		_, saved := s.Save(t.Context(), id, paper{}, &rest{}, nil)
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

// A sweep leaves alone what is being made, and saves, uses and deletions of the same names don't get into each other's way.
func TestTogether(t *testing.T) {
	s := newShelf(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 10 {
				id := fmt.Sprint("s", (i+n)%3)
				_, err := s.Save(t.Context(), id, paper{text: id}, &rest{}, nil)
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

// A sweep that takes the directory from under somebody who is about to use a snapshot is nothing that he hears of.
func TestSweptMeanwhile(t *testing.T) {
	s := newShelf(t)
	users := filepath.Join(s.cfg.RunDir, "snapshots", "users")
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = os.Remove(filepath.Join(users, "none")) // as a sweep does, if it is empty
			}
		}
	})
	for range 2000 {
		if err := s.use(t, "none"); !errdefs.IsNotFound(err) {
			t.Error(err)
			break
		}
	}
	close(done)
	wg.Wait()
}

// TestNote: what the owner keeps with a snapshot is there as it was; without it there is no snapshot.
func TestNote(t *testing.T) {
	s := newShelf(t)
	for want, given := range map[string]string{"": "{}", "no": "", "damaged": `"` + strings.Repeat("x", 1<<20) + `"`} {
		info, err := s.Save(t.Context(), "noted", paper{}, &rest{}, func() (json.RawMessage, error) {
			if given == "" {
				return nil, errors.New("no")
			}
			return json.RawMessage(given), nil
		})
		again, found := s.Inspect("noted")
		switch {
		case want == "" && (err != nil || found != nil || string(again.Note) != given || string(info.Note) != given):
			t.Errorf("kept %s and %s, %v, %v", info.Note, again.Note, err, found)
		case want == "":
			if _, err := s.Delete("noted"); err != nil {
				t.Error(err)
			}
		case err == nil || !strings.Contains(err.Error(), want) || !errdefs.IsNotFound(found):
			t.Errorf("%s: %v, %v", want, err, found)
		}
	}
}
