package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	server "github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

const (
	memoryMB = 128
	diskMB   = 100
)

// stand is a registry, and a host with a snapshot.
type stand struct {
	*testing.T
	url   string // of the registry
	host  string
	store *snapshot.Store
	cfg   *config.Config
	files map[string][]byte // of the snapshot "origin"

	mu     sync.Mutex
	before func(w http.ResponseWriter, r *http.Request) bool // takes a request, if it says so
	sent   atomic.Int32                                      // blobs that were uploaded
	asked  atomic.Int32                                      // blobs that were fetched
}

func newStand(t *testing.T) *stand {
	t.Helper()
	s := &stand{T: t, cfg: config.Default()}
	dir := t.TempDir()
	s.cfg.StateDir, s.cfg.RunDir = filepath.Join(dir, "state"), filepath.Join(dir, "run")
	s.store = snapshot.New(s.cfg, slog.New(slog.DiscardHandler))
	h := server.New(server.Logger(log.New(io.Discard, "", 0)))
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		before := s.before
		s.mu.Unlock()
		if before != nil && before(w, r) {
			return
		}
		switch {
		case r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/blobs/uploads/"):
			s.sent.Add(1)
		case r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/"):
			s.asked.Add(1)
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(web.Close)
	s.url, s.host = web.URL, strings.TrimPrefix(web.URL, "http://")
	s.make()
	return s
}

// within has a part of the test be the one that fails, until done is called.
func (s *stand) within(t *testing.T) (done func()) {
	was := s.T
	s.T = t
	return func() { s.T = was }
}

// take has f see requests before the registry does, and answer those that it says.
func (s *stand) take(f func(w http.ResponseWriter, r *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = f
}

func (s *stand) hosts(string) ([]docker.RegistryHost, error) {
	return []docker.RegistryHost{{
		Client: http.DefaultClient, Host: s.host, Scheme: "http", Path: "/v2",
		Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve | docker.HostCapabilityPush,
	}}, nil
}

func (s *stand) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// make makes the snapshot: a state that is no whole chunk, a memory of two parts with a hole, and a disk.
func (s *stand) make() {
	noise := rand.NewChaCha8([32]byte{1})
	fill := func(b []byte) {
		_, _ = noise.Read(b) // never fails
	}
	s.files = map[string][]byte{vmm.StateFile: make([]byte, 5000), vmm.MemoryFile: make([]byte, memoryMB<<20), vmm.DiskFile(vmm.RootSerial): make([]byte, diskMB<<20-512)}
	fill(s.files[vmm.StateFile])
	for _, mb := range []int{0, 1, 31, 32, 100} {
		copy(s.files[vmm.MemoryFile][mb<<20+8192:], strings.Repeat(fmt.Sprint("page of ", mb), 1000))
	}
	fill(s.files[vmm.MemoryFile][101<<20 : 102<<20])
	fill(s.files[vmm.DiskFile(vmm.RootSerial)][40<<20 : 41<<20])
	copy(s.files[vmm.DiskFile(vmm.RootSerial)][(diskMB-1)<<20:], "the last")
	info := snapshot.Info{
		Format: 1, Platform: vmm.Platform{Board: 1, QEMU: "q", Guest: "g", Accel: "tcg", CPU: "max", TSCKHz: 2_000_000}, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: memoryMB}, Frozen: true,
		State: s.file(vmm.StateFile), Memory: s.file(vmm.MemoryFile),
		Disks: []snapshot.Disk{{SavedDisk: vmm.SavedDisk{Serial: vmm.RootSerial, LUN: 1}, File: s.file(vmm.DiskFile(vmm.RootSerial))}},
	}
	s.must(s.store.Import("origin", info, func(put snapshot.Put) error {
		for _, f := range info.Files() {
			for n := range f.Digests {
				at := n << 20
				if err := put(f.Name, n, s.files[f.Name][at:at+memory.ChunkLen(f.Size, n)]); err != nil {
					return err
				}
			}
		}
		return nil
	}))
}

// file is what is to be known of one.
func (s *stand) file(name string) snapshot.File {
	s.Helper()
	f, err := os.Create(filepath.Join(s.TempDir(), name))
	s.must(err)
	defer f.Close()
	_, err = f.Write(s.files[name])
	s.must(err)
	size := int64(len(s.files[name]))
	sums, err := memory.Digest(f, size)
	s.must(err)
	return snapshot.File{Size: size, Digests: sums}
}

// config is what is pushed, and read what that is read by.
func (s *stand) config() (c Config, read Read) {
	s.Helper()
	o, err := s.store.Open("origin", "test")
	s.must(err)
	s.Cleanup(func() { o.Close() })
	return Config{
		Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Template: Template{
			Settings: db.Settings{EnvdVersion: "0.6.13", User: "user", Workdir: "/home/user", Run: "serve", Digest: "sha256:x", Builder: "b"},
			Env:      []string{"PATH=/bin"}, ImageName: "debian", CPUs: 1, MemoryMB: memoryMB,
		},
		Machine: Machine{Snapshot: o.Info.Foreign(), Guest: "c1", Process: saved.Process{Number: 1, Stdout: true}, Event: 7},
	}, o.ReadChunk
}

// push pushes it by that name, and returns the one with the digest.
func (s *stand) push(ctx context.Context, name string) (string, error) {
	s.Helper()
	c, read := s.config()
	return Push(ctx, s.host+"/"+name, s.hosts, c, read, s.tell)
}

func (s *stand) tell(message string) { s.Log(message) }

// pull opens what has that name and takes it into the store, by that id.
func (s *stand) pull(ctx context.Context, name, id string, mem bool) (*Artefact, error) {
	s.Helper()
	a, err := Open(ctx, name, s.hosts)
	if err != nil {
		return nil, err
	}
	i := a.Machine.Snapshot
	if !mem {
		i = i.WithoutMemory()
	}
	return a, s.store.Import(id, i, func(put snapshot.Put) error { return a.Fetch(ctx, &i, put, s.tell) })
}

// same sees that a snapshot has those files of the origin's, with holes where they had some.
func (s *stand) same(id string, names ...string) {
	s.Helper()
	o, err := s.store.Open(id, "test")
	s.must(err)
	s.must(o.Close())
	for _, name := range names {
		path := filepath.Join(s.cfg.SnapshotDir(), id, name)
		b, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(b, s.files[name]) {
			s.Errorf("%s isn't the same: %v", name, err)
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || st.Blocks*512 > 3<<20 {
			s.Errorf("%s takes %d bytes, %v", name, st.Blocks*512, err)
		}
	}
}

// nothing sees that no snapshot is left, nor half of one, but the origin.
func (s *stand) nothing() {
	s.Helper()
	all, err := os.ReadDir(s.cfg.SnapshotDir())
	if err != nil || len(all) != 1 {
		s.Errorf("left: %v, %v", all, err)
	}
}

// What is pushed comes back as it was, by its tag and by its digest, whole or the disk alone; and it is sent once.
func TestPushPull(t *testing.T) {
	s := newStand(t)
	at, err := s.push(t.Context(), "team/app:v1")
	s.must(err)
	first := s.sent.Load() // the config, the state, 3 parts of memory, 2 of the disk
	if first != 7 {
		t.Errorf("%d blobs were sent", first)
	}
	again, err := s.push(t.Context(), "team/app:v2")
	if err != nil || again != at || s.sent.Load() != first {
		t.Errorf("pushed again: %s, not %s, %d blobs, %v", again, at, s.sent.Load()-first, err)
	}
	a, err := s.pull(t.Context(), s.host+"/team/app:v2", "whole", true)
	s.must(err)
	s.same("whole", vmm.StateFile, vmm.MemoryFile, vmm.DiskFile(vmm.RootSerial))
	want, _ := s.config()
	want.Format = configFormat
	have, wanted := encode(t, a.Config), encode(t, want)
	if a.Name != at || have != wanted {
		t.Errorf("it comes back as %s\n%s, not\n%s", a.Name, have, wanted)
	}
	if a.Machine.DiskMB() != diskMB {
		t.Errorf("its disk has %d MiB", a.Machine.DiskMB())
	}
	before := s.asked.Load()
	_, err = s.pull(t.Context(), at, "disk", false)
	s.must(err)
	if n := s.asked.Load() - before; n != 3 { // the config, and the disk's two parts
		t.Errorf("%d blobs were fetched for the disk", n)
	}
	s.same("disk", vmm.DiskFile(vmm.RootSerial))
	if _, err := os.Stat(filepath.Join(s.cfg.SnapshotDir(), "disk", vmm.MemoryFile)); !os.IsNotExist(err) {
		t.Errorf("there is memory: %v", err)
	}
}

// A push that breaks off leaves nothing that could be pulled, and goes on where it was.
func TestPushGoesOn(t *testing.T) {
	s := newStand(t)
	var most atomic.Int32
	most.Store(3)
	s.take(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut || most.Add(-1) >= 0 {
			return false
		}
		w.WriteHeader(http.StatusInsufficientStorage)
		return true
	})
	if _, err := s.push(t.Context(), "app"); !errdefs.IsUnavailable(err) {
		t.Errorf("broken off: %v", err)
	}
	if _, err := Open(t.Context(), s.host+"/app:latest", s.hosts); !errdefs.IsNotFound(err) {
		t.Errorf("half of it is there: %v", err)
	}
	s.take(nil)
	if _, err := s.push(t.Context(), "app:latest"); err != nil || s.sent.Load() != 7 {
		t.Errorf("%d blobs were sent, %v", s.sent.Load(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.push(ctx, "other:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	if _, err := s.pull(ctx, s.host+"/app:latest", "x", true); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	s.nothing()
}

// A damaged snapshot isn't pushed.
func TestPushDamaged(t *testing.T) {
	s := newStand(t)
	f, err := os.OpenFile(filepath.Join(s.cfg.SnapshotDir(), "origin", vmm.MemoryFile), os.O_RDWR, 0)
	s.must(err)
	_, err = f.WriteAt([]byte("x"), 32<<20+8192)
	s.must(errors.Join(err, f.Close()))
	if _, err := s.push(t.Context(), "app:1"); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), "MiB 32") {
		t.Errorf("%v", err)
	}
	if _, err := Open(t.Context(), s.host+"/app:1", s.hosts); !errdefs.IsNotFound(err) {
		t.Errorf("it is there: %v", err)
	}
}

// Names are what images have.
func TestNames(t *testing.T) {
	for in, want := range map[string]string{
		"r.example:5000/a/b": "r.example:5000/a/b:latest", "r.example/a:1": "r.example/a:1", "a": "docker.io/library/a:latest",
	} {
		if got, err := Name(in); err != nil || got != want {
			t.Errorf("%s: %s, %v", in, got, err)
		}
	}
	for _, bad := range []string{"", "R", "a b", "a:", "/a", "a@sha256:1"} {
		if got, err := Name(bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %s, %v", bad, got, err)
		}
	}
	if got := Host("r.example:5000/a/b:1"); got != "r.example:5000" {
		t.Errorf("the registry %s", got)
	}
}

func encode(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
