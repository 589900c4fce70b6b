package snapshot_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm/snapshot"
)

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
