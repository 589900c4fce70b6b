// Package templates makes templates of images and of other templates: steps are done in a machine, which ends with them; one that
// begins with the disk that they have come to runs what the template is to run, and is saved; and a sandbox that is made of what was
// saved proves that it can be used. Until then there is no template. The disks between steps are kept for builds to come.
package templates

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

const (
	// answerTimeout bounds how long envd takes to answer in a machine that has just been started.
	answerTimeout = time.Minute
	// checkTimeout bounds the proof that the network works.
	checkTimeout = 30 * time.Second
	// undoTimeout bounds the removal of a machine.
	undoTimeout = 30 * time.Second
)

// Machines are those of this host.
type Machines interface {
	Fetch(ctx context.Context, f sandbox.Fetch) (sandbox.Fetched, error)
	Begin(ctx context.Context, b lifecycle.Beginning) (addr netip.Addr, container json.RawMessage, err error)
	Create(ctx context.Context, m lifecycle.Machine) (netip.Addr, error)
	Save(ctx context.Context, id, snapshot string) error
	SaveDisk(ctx context.Context, id, snapshot, before string) (bytes int64, err error)
	Has(ctx context.Context, snapshot string) (bool, error)
	Forget(ctx context.Context, snapshot string) error
	Kill(ctx context.Context, id string) error
	All(ctx context.Context) (map[string]lifecycle.Seen, error)
	Log(ctx context.Context, id string, q lifecycle.LogQuery) ([]lifecycle.LogEntry, error)
}

// Store is where machines' snapshots are carried from and to.
type Store interface {
	// Hosts are where a registry is asked for what somebody names.
	Hosts(ctx context.Context, name, user, secret string) docker.RegistryHosts
	Export(ctx context.Context, snapshot string) (what registry.Machine, read registry.Read, done func() error, err error)
	// Import makes a snapshot of what fill puts into it, without memory one of the disk alone, whole or not at all.
	Import(ctx context.Context, snapshot string, of registry.Machine, memory bool, fill func(*snapshot.Info, snapshot.Put) error) error
	// Blueprint is what a Machine has as its Container whose disk comes from elsewhere.
	Blueprint(ctx context.Context, b lifecycle.Beginning) (json.RawMessage, error)
}

// Guests is what answers in machines.
type Guests interface {
	Init(ctx context.Context, addr netip.Addr, i lifecycle.Init) error
	Version(ctx context.Context, addr netip.Addr) (string, error)
	Do(ctx context.Context, addr netip.Addr, c guests.Command, each func(line string, isError bool)) error
	Run(ctx context.Context, addr netip.Addr, token, command string) (output string, err error)
	Stat(ctx context.Context, addr netip.Addr, user, path string) error
	MakeDir(ctx context.Context, addr netip.Addr, user, path string) error
	Until(ctx context.Context, addr netip.Addr, command string) error
	Listens(ctx context.Context, addr netip.Addr, port int) error
}

// Room is what there is of the host: a lifecycle.Engine.
type Room interface {
	// AdmitBuild sets aside what a machine takes, until done. What there isn't enough of now is an *admission.Refusal, what the host
	// never has errdefs.ErrFailedPrecondition.
	AdmitBuild(ctx context.Context, s admission.Shape) (done func(), err error)
}

// Builder makes templates. All methods may be called from many goroutines.
type Builder struct {
	Config   *config.Config
	Machines Machines
	Guests   Guests
	Layers   Layers
	Room     Room
	// Store and Fits are what templates of registries need. Fits says what keeps a saved machine from being restored here; that is
	// errdefs.ErrFailedPrecondition.
	Store Store
	Fits  func(ctx context.Context, of *snapshot.Info) error
	Log   *slog.Logger
	// Version is what templates are said to be made by.
	Version string

	mu    sync.Mutex
	users map[string]int // of layers, by snapshot
}
