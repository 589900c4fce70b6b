package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/shim/saved"
)

// TestDamagedCheckpoint: what is damaged, cut short, of later or of another host isn't made a container of. The checks are
// those of vmm/snapshot's tests; here it is that they come before a guest runs, and that nothing is left.
func TestDamagedCheckpoint(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "whole").run(ctx, "")
	dir := b.checkpoint(ctx, client)
	b.end(ctx)
	checkpoint, err := saved.ReadCheckpoint(dir)
	must(t, err)
	at := filepath.Join(s.Config.SnapshotDir(), checkpoint.Snapshot)
	manifest := filepath.Join(dir, "cube-checkpoint.json")
	flip := func(path string) error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		bit := make([]byte, 1)
		_, err = f.ReadAt(bit, 1080) // an ext4's superblock, if it is a disk
		bit[0] ^= 1
		_, werr := f.WriteAt(bit, 1080)
		return errors.Join(err, werr)
	}
	for _, c := range []struct {
		what, file string
		spoil      func(path string) error
		want       string
		long       bool
	}{
		{"a bit of the memory", at + "/memory", flip, "memory is damaged", false},
		{"a bit of the disk", at + "/disk-root", flip, "disk-root is damaged", true},
		{"a bit of the state", at + "/state", flip, "state is damaged", true},
		{"a disk cut short", at + "/disk-root", func(path string) error { return os.Truncate(path, 4096) }, "disk-root has 4096 bytes", false},
		{"no memory", at + "/memory", os.Remove, "memory", true},
		{"a description cut short", at + "/snapshot.json", func(path string) error { return os.Truncate(path, 100) }, "snapshot.json", true},
		{"another container's", at + "/snapshot.json", func(path string) error { return os.WriteFile(path, []byte(`{"snapshot":{},"sha256":""}`), 0o600) }, "snapshot.json", false},
		{"a manifest cut short", manifest, func(path string) error { return os.Truncate(path, 10) }, "checkpoint", false},
		{"an empty manifest", manifest, func(path string) error { return os.Truncate(path, 0) }, "checkpoint", true},
		{"a manifest of later", manifest, func(path string) error { return edit(path, "format", 9) }, "it has format 9", false},
		{"a manifest that names another's", manifest, func(path string) error { return edit(path, "container", "stranger") }, "stranger", true},
		{"a manifest with a path", manifest, func(path string) error { return edit(path, "snapshot", "../x") }, "snapshot name", true},
	} {
		if c.long && os.Getenv("CUBE_TEST_LONG") == "" {
			continue
		}
		must(t, os.Rename(c.file, c.file+".whole"))
		must(t, copyFile(c.file+".whole", c.file))
		must(t, c.spoil(c.file))
		err := b.create(ctx, dir)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", c.what, err)
		}
		if b.task != nil && err == nil {
			t.Fatalf("%s: there is a task", c.what)
		}
		for _, p := range s.Processes("qemu-system") {
			if strings.Contains(p.Command, b.id) {
				t.Errorf("%s: %s runs", c.what, p)
			}
		}
		must(t, os.Rename(c.file+".whole", c.file))
	}
	b.run(ctx, dir) // all is as it was
	b.counts(1)
	b.end(ctx)
}

func copyFile(from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	t, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = reflink.Clone(context.Background(), t, f)
	return errors.Join(err, t.Close())
}

// edit changes a field of a JSON object.
func edit(path, field string, value any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	m[field] = value
	if b, err = json.Marshal(m); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// TestHostMounts: a container that sees files of the host isn't saved, in whichever way that is asked for, and goes on.
func TestHostMounts(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	shared := t.TempDir()
	b := newBox(t, client, ctx, "shares", oci.WithMounts([]specs.Mount{{Type: "bind", Source: shared, Destination: "/mnt", Options: []string{"rbind", "rw"}}})).run(ctx, "")
	b.counts(1)
	_, err := b.shim(ctx).Save(ctx, b.id, "")
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), shared) {
		t.Errorf("saved: %v", err)
	}
	dir := filepath.Join(t.TempDir(), "checkpoint")
	o, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir})
	must(t, err)
	if _, err = client.TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: b.id, Options: o}); err == nil || !strings.Contains(err.Error(), shared) {
		t.Errorf("checkpoint: %v", err)
	}
	if r := s.Ctr("task", "checkpoint", "--image-path", dir, b.id); r.Err == nil || !strings.Contains(r.Stderr, shared) {
		t.Errorf("ctr: %+v", r)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if all, err := st.List(); err != nil || len(all) > 0 {
		t.Errorf("snapshots %v, %v", all, err)
	}
	b.counts(2)
	b.end(ctx)
}
