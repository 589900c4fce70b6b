package templates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// team is whose all is.
const team = "default"

// world stands for machines and what answers in them: a disk is a list of what was done to it.
type world struct {
	t *testing.T

	mu      sync.Mutex
	image   string // the digest of all images
	begun   int    // machines that were
	beings  map[netip.Addr]*being
	kept    map[string][]string // disks of snapshots
	shells  bool                // images have bash
	bare    bool                // completed ones, too, have none until a step has installed it
	notYet  error               // of what is to be ready
	blocked chan struct{}       // a command that says so waits for it
	room    int                 // that is set aside
	full    error               // that there is none
	noTmp   bool                // images have no /tmp
	stuck   error               // of what is to be removed
	broken  error               // of machines that are to begin
	were    bool                // what is ready once was
	lost    bool                // nobody hears of saves, which go on as long as the machine
}

// AdmitBuild is of Room.
func (w *world) AdmitBuild(context.Context, admission.Shape) (done func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.full != nil {
		return nil, w.full
	}
	w.room++
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.room--
	}, nil
}

// being is a machine.
type being struct {
	lifecycle.Beginning
	disk   []string
	user   string
	saving string // what its disk is being saved as
}

func newWorld(t *testing.T) (*world, *Builder) {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	d, err := db.Open(t.Context(), filepath.Join(cfg.StateDir, "db"))
	must(t, err)
	t.Cleanup(func() { d.Close() })
	for _, name := range []string{team, "others"} {
		_, err := d.CreateKey(t.Context(), name)
		must(t, err)
	}
	w := &world{t: t, image: "sha256:one", shells: true, beings: map[netip.Addr]*being{}, kept: map[string][]string{}, blocked: make(chan struct{})}
	return w, &Builder{Config: cfg, Machines: w, Guests: w, Layers: d, Room: w, Log: slog.New(slog.DiscardHandler), Version: "test"}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// left are the machines that there are.
func (w *world) left() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.beings)
}

func (w *world) Fetch(_ context.Context, f sandbox.Fetch) (sandbox.Fetched, error) {
	if f.Ref == "absent" {
		return sandbox.Fetched{}, errdefs.ErrNotFound.WithMessage("the registry doesn't have it")
	}
	return sandbox.Fetched{Name: "docker.io/" + f.Ref, Digest: w.image, Env: []string{"PATH=/bin", "LANG=C"}}, nil
}

func (w *world) Begin(_ context.Context, b lifecycle.Beginning) (netip.Addr, json.RawMessage, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken != nil {
		return netip.Addr{}, nil, w.broken
	}
	m := &being{Beginning: b, disk: []string{b.Image}}
	if b.Disk != "" {
		disk, ok := w.kept[b.Disk]
		if !ok {
			return netip.Addr{}, nil, errdefs.ErrNotFound.WithMessage("no snapshot " + b.Disk)
		}
		m.disk = slices.Clone(disk)
	}
	blueprint, err := json.Marshal(sandbox.Blueprint{Image: b.Image, Spec: &specs.Spec{Process: &specs.Process{Env: b.Env}}})
	return w.add(m), blueprint, err
}

func (w *world) add(m *being) netip.Addr {
	w.begun++
	addr := netip.AddrFrom4([4]byte{10, 0, byte(w.begun >> 8), byte(w.begun)})
	w.beings[addr] = m
	return addr
}

func (w *world) Create(_ context.Context, m lifecycle.Machine) (netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.add(&being{Beginning: lifecycle.Beginning{ID: m.ID}, disk: slices.Clone(w.kept[m.Snapshot])}), nil
}

// of finds a machine by its id.
func (w *world) of(id string) *being {
	for _, m := range w.beings {
		if m.ID == id {
			return m
		}
	}
	return nil
}

func (w *world) Save(ctx context.Context, id, snapshot string) error {
	_, err := w.SaveDisk(ctx, id, snapshot, "")
	return err
}

func (w *world) SaveDisk(ctx context.Context, id, snapshot, _ string) (int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if w.lost {
		w.of(id).saving = snapshot
		return 0, errdefs.ErrUnavailable.WithMessage("containerd has gone")
	}
	w.kept[snapshot] = slices.Clone(w.of(id).disk)
	return 1 << 20, nil
}

func (w *world) Has(_ context.Context, snapshot string) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.kept[snapshot] != nil, nil
}

func (w *world) Forget(_ context.Context, snapshot string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stuck != nil {
		return w.stuck
	}
	delete(w.kept, snapshot)
	return nil
}

func (w *world) Kill(_ context.Context, id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for addr, m := range w.beings {
		if m.ID != id {
			continue
		}
		delete(w.beings, addr)
		if m.saving != "" {
			w.kept[m.saving] = m.disk
		}
	}
	return nil
}

func (w *world) All(context.Context) (map[string]lifecycle.Seen, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := map[string]lifecycle.Seen{}
	for _, m := range w.beings {
		all[m.ID] = lifecycle.Seen{State: lifecycle.Runs}
	}
	return all, nil
}

func (w *world) Log(context.Context, string, lifecycle.LogQuery) ([]lifecycle.LogEntry, error) {
	return []lifecycle.LogEntry{{Message: "second"}, {Message: "first"}}, nil
}

func (w *world) at(addr netip.Addr) *being {
	m := w.beings[addr]
	if m == nil {
		w.t.Errorf("there is no machine at %s", addr)
		return &being{}
	}
	return m
}

func (w *world) Init(_ context.Context, addr netip.Addr, i lifecycle.Init) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.at(addr); i.User != "" {
		if !w.knows(m, i.User) {
			return errdefs.ErrUnavailable.WithMessage("defaultUser: there is no user " + i.User)
		}
		m.user = i.User
	}
	return nil
}

// knows tells whether there is a user on a machine's disk.
func (w *world) knows(m *being, user string) bool {
	return user == "root" || w.shells && user == "user" || slices.Contains(m.disk, "complete "+user) || slices.Contains(m.disk, "useradd "+user)
}

// hasBash tells whether bash has been brought to a machine's disk.
func (w *world) hasBash(m *being) bool {
	return !w.bare && slices.Contains(m.disk, "complete user") || slices.Contains(m.disk, "sh: install bash")
}

func (w *world) Version(context.Context, netip.Addr) (string, error) { return "0.6.13", nil }

func (w *world) Do(ctx context.Context, addr netip.Addr, c guests.Command, each func(string, bool)) error {
	w.mu.Lock()
	m := w.at(addr)
	known := w.knows(m, c.User)
	w.mu.Unlock()
	if !known {
		return errdefs.ErrUnauthenticated.WithMessage("there is no user " + c.User)
	}
	did := c.Args[len(c.Args)-1]
	if c.Program == sh {
		did = "sh: " + did
	}
	switch {
	case c.Program == sandbox.Envd && c.Args[0] == "complete":
		did = "complete " + c.Args[2]
	case c.Program == sandbox.Envd:
		b, err := io.ReadAll(c.Input)
		if err != nil {
			return err
		}
		did = fmt.Sprintf("%s <%s>", strings.Join(c.Args, " "), b)
	case strings.HasPrefix(did, "wait"):
		select {
		case <-w.blocked:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	case strings.HasPrefix(did, "fail"):
		for i := range 30 {
			each(fmt.Sprint("line ", i), i%2 == 1)
		}
		return &guests.Ended{Status: "exit status 3"}
	}
	each("out of "+did, false)
	w.mu.Lock()
	defer w.mu.Unlock()
	m.disk = append(m.disk, did)
	return nil
}

func (w *world) Run(context.Context, netip.Addr, string, string) (string, error) { return "", nil }

func (w *world) Stat(_ context.Context, addr netip.Addr, user, path string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.at(addr)
	switch {
	case !w.knows(m, user):
		return errdefs.ErrUnauthenticated.WithMessage("there is no user " + user)
	case path == bash && !w.shells && !w.hasBash(m):
		return errdefs.ErrNotFound.WithMessage("no " + path)
	case path == "/tmp" && w.noTmp && !slices.Contains(m.disk, "complete user"):
		return errdefs.ErrNotFound.WithMessage("no " + path)
	}
	return nil
}

func (w *world) MakeDir(_ context.Context, addr netip.Addr, user, path string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.at(addr)
	if path != "/home/user" {
		m.disk = append(m.disk, "mkdir "+path+" "+user)
	}
	return nil
}

func (w *world) Until(ctx context.Context, _ netip.Addr, command string) error {
	switch {
	case command == "never":
		<-ctx.Done()
		return errors.New("exit status 7: connection refused")
	case command == "once" && w.were:
		return errors.New("exit status 1")
	}
	w.were = true
	return w.notYet
}

func (w *world) Listens(context.Context, netip.Addr, int) error { return nil }

// uploads are those of clients.
type uploads map[string]string

func (u uploads) Open(_ context.Context, team, sum string) (io.ReadCloser, error) {
	text, ok := u[team+"/"+sum]
	if !ok {
		return nil, errdefs.ErrNotFound
	}
	return io.NopCloser(strings.NewReader(text)), nil
}

// told collects what is reported, "STEP MESSAGE".
type told struct {
	mu    sync.Mutex
	lines []string
}

func (l *told) tell(step string, level lifecycle.Level, message string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if level != lifecycle.Debug {
		l.lines = append(l.lines, step+" "+message)
	}
}

func (l *told) has(line string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Contains(l.lines, line)
}

// within bounds what shouldn't hang.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}
