package templates

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	server "github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// carried has a world's snapshots be carried to a registry, and back as what a snapshot's disk is made of.
type carried struct {
	*world
	host string
	// unfit is what keeps its machine from being restored.
	unfit error
	made  map[string]bool // what was imported, and whether with memory
}

const pulledMB = 128

func (c *carried) Hosts(context.Context, string, string, string) docker.RegistryHosts {
	return func(string) ([]docker.RegistryHost, error) {
		return []docker.RegistryHost{{Client: http.DefaultClient, Host: c.host, Scheme: "http", Path: "/v2", Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve | docker.HostCapabilityPush}}, nil
	}
}

func (c *carried) Export(_ context.Context, name string) (registry.Machine, registry.Read, func() error, error) {
	if _, ok := c.kept[name]; !ok {
		return registry.Machine{}, nil, nil, errdefs.ErrNotFound
	}
	chunk := make([]byte, memory.ChunkSize)
	_, _ = rand.Read(chunk[:4096]) // never fails (crypto/rand)
	sums := digests(c.t, chunk)
	file := func(size int64) snapshot.File { return snapshot.File{Size: size, Digests: sums} }
	m := registry.Machine{Guest: "c1", Process: saved.Process{Number: 1}, Snapshot: snapshot.Info{
		Format: 1, Frozen: true, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: pulledMB}, Platform: vmm.Platform{QEMU: "q", Guest: "g"},
		State: file(memory.ChunkSize), Memory: file(pulledMB << 20),
		Disks: []snapshot.Disk{{SavedDisk: vmm.SavedDisk{Serial: vmm.RootSerial}, File: file(20 << 20)}},
	}}
	return m, func(string, int64, []byte) ([]byte, error) { return chunk, nil }, func() error { return nil }, nil
}

// digests are those of a file that begins with a chunk.
func digests(t *testing.T, chunk []byte) memory.Digests {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer f.Close()
	_, err = f.Write(chunk)
	must(t, err)
	d, err := memory.Digest(f, int64(len(chunk)))
	must(t, err)
	return d
}

func (c *carried) Import(_ context.Context, name string, of registry.Machine, mem bool, fill func(*snapshot.Info, snapshot.Put) error) error {
	info := of.Snapshot
	if !mem {
		info = info.WithoutMemory()
	}
	chunks := 0
	if err := fill(&info, func(string, int64, []byte) error { chunks++; return nil }); err != nil {
		return err
	}
	if want := len(info.Files()); chunks != want {
		c.t.Errorf("%d chunks, not %d", chunks, want)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made[name], c.kept[name] = mem, []string{"carried"}
	return nil
}

func (c *carried) Blueprint(_ context.Context, b lifecycle.Beginning) (json.RawMessage, error) {
	return json.Marshal(sandbox.Blueprint{Image: sandbox.Blank, Spec: &specs.Spec{Process: &specs.Process{Env: b.Env, Args: b.Args}}})
}

// newCarried has a template be in a registry, of which it returns what Look says.
func newCarried(t *testing.T) (*carried, *Builder, Recipe) {
	w, b := newWorld(t)
	web := httptest.NewServer(server.New(server.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(web.Close)
	c := &carried{world: w, host: strings.TrimPrefix(web.URL, "http://"), made: map[string]bool{}}
	b.Store, b.Fits = c, func(context.Context, *snapshot.Info) error { return c.unfit }
	must(t, os.MkdirAll(b.Config.StoreDir(), 0o700))

	made, err := b.Make(within(t), Recipe{Team: team, Image: "debian", CPUs: 1, MemoryMB: pulledMB, Run: "serve", Ready: "ready", Profile: "resident"}, nil, (&told{}).tell, "first")
	must(t, err)
	of := db.Build{ID: "b1", Snapshot: "first", CPUs: 1, MemoryMB: pulledMB, DiskMB: made.DiskMB, Settings: made.Settings, CreatedAt: time.Now()}
	at, err := b.Push(within(t), of, c.host+"/app:1", nil, func(string) {})
	must(t, err)
	a, err := b.Look(within(t), c.host+"/app:1", nil)
	must(t, err)
	if a.Name != at || a.CPUs != 1 || a.MemoryMB != pulledMB || a.DiskMB != 20 || a.Settings.Run != "serve" || a.Settings.Digest != w.image {
		t.Errorf("%+v of %s", a, at)
	}
	s := a.Settings
	return c, b, Recipe{Team: team, Artefact: a.Name, CPUs: a.CPUs, MemoryMB: a.MemoryMB, DiskMB: a.DiskMB, User: s.User, Workdir: s.Workdir, Run: s.Run, Ready: s.Ready, Profile: "resident"}
}

// A machine of a registry that is trusted is taken as it was saved, if it can be restored, and proved.
func TestPullWhole(t *testing.T) {
	c, b, r := newCarried(t)
	b.Config.Templates.TrustedRegistries = []string{c.host}
	before := c.begun
	var l told
	made, err := b.Make(within(t), r, nil, l.tell, "second")
	must(t, err)
	if mem, ok := c.made["second"]; !ok || !mem || c.begun != before+1 || c.left() != 0 || c.room != 0 {
		t.Errorf("made %v with %d machines, of which %d are left", c.made, c.begun-before, c.left())
	}
	s := made.Settings
	if s.Run != "serve" || s.Ready != "ready" || s.Profile != "resident" || s.EnvdVersion != "0.6.13" || made.DiskMB != 20 || made.Digest != c.image || s.Inputs == "" {
		t.Errorf("%+v", made)
	}
	var blueprint sandbox.Blueprint
	must(t, json.Unmarshal(s.Container, &blueprint))
	if blueprint.Image != sandbox.Blank || !slices.Contains(blueprint.Spec.Process.Env, "LANG=C") || !slices.Contains(blueprint.Spec.Process.Args, "serve") {
		t.Errorf("its container: %s", s.Container)
	}

	c.notYet = errors.New("exit status 1")
	if _, err := b.Make(within(t), r, nil, l.tell, "third"); err == nil || c.kept["third"] != nil || c.left() != 0 || c.room != 0 {
		t.Errorf("what isn't ready: %v, %v", err, c.kept)
	}
}

// From elsewhere, and where it can't be restored, a machine begins with its disk, which is kept for the next pull.
func TestPullDisk(t *testing.T) {
	c, b, r := newCarried(t)
	var l told
	made, err := b.Make(within(t), r, nil, l.tell, "second")
	must(t, err)
	if len(c.made) != 1 || !slices.ContainsFunc(l.lines, func(line string) bool { return strings.Contains(line, "isn't one of templates.trusted_registries") }) {
		t.Errorf("%v: %q", c.made, l.lines)
	}
	for name, mem := range c.made {
		if mem || !strings.HasPrefix(name, "layer-") {
			t.Errorf("%s was made, with memory: %v", name, mem)
		}
	}
	if s := made.Settings; s.Run != "serve" || s.Profile != "resident" || !slices.Contains(c.kept["second"], "carried") || made.Digest != c.image || made.DiskMB != r.DiskMB && made.DiskMB != int(b.Config.Store.DiskSize>>20) {
		t.Errorf("%+v of %v", made, c.kept["second"])
	}
	b.Config.Templates.TrustedRegistries = []string{c.host}
	c.unfit = errdefs.ErrFailedPrecondition.WithMessage("its QEMU isn't here")
	if _, err := b.Make(within(t), r, nil, l.tell, "third"); err != nil || len(c.made) != 1 || !l.has("base only its disk is taken, and a machine begins with that: its QEMU isn't here") {
		t.Errorf("%v, %v: %q", err, c.made, l.lines)
	}
	if c.left() != 0 || c.room != 0 {
		t.Errorf("%d machines are left", c.left())
	}
}

// What can't be pulled says why, before anything is made.
func TestPullRefused(t *testing.T) {
	c, b, r := newCarried(t)
	b.Config.Templates.TrustedRegistries = []string{c.host}
	var l told
	refused := func(what, says string, r Recipe) {
		t.Helper()
		if _, err := b.Make(within(t), r, nil, l.tell, "second"); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", what, err)
		}
		if len(c.made) > 0 || c.kept["second"] != nil {
			t.Errorf("%s: it was made", what)
		}
	}
	bad := r
	bad.Steps = []Step{{Type: Run, Args: []string{"x"}}}
	refused("steps", "nothing is done to it", bad)
	bad = r
	bad.CPUs = 2
	refused("another size", "1 CPUs and 128 MiB", bad)
	bad = r
	bad.Artefact = c.host + "/none:1"
	refused("none", "doesn't have it", bad)
	c.unfit = errors.New("it can't be told")
	refused("what can't be told", "it can't be told", r)
	c.unfit = nil
	b.Config.Store.HighWatermark = 0
	refused("a full store", "store", r)
	if layers, err := b.Layers.Layers(t.Context()); err != nil || len(layers) > 0 {
		t.Errorf("layers: %v, %v", layers, err)
	}
}

// What has no snapshot isn't pushed.
func TestPushRefused(t *testing.T) {
	_, b, _ := newCarried(t)
	silent := func(string) {}
	if _, err := b.Push(t.Context(), db.Build{Settings: db.Settings{Image: "debian"}}, "r.example/a:1", nil, silent); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("of an image: %v", err)
	}
	for _, name := range []string{"A b", "r.example/a@sha256:" + strings.Repeat("0", 64)} {
		if _, err := b.Push(t.Context(), db.Build{}, name, nil, silent); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := b.Push(t.Context(), db.Build{Settings: db.Settings{Container: json.RawMessage("{}")}}, "r.example/a:1", nil, silent); !errdefs.IsDataLoss(err) {
		t.Errorf("of nothing: %v", err)
	}
}
