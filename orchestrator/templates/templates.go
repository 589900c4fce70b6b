// Package templates makes templates of images and of other templates: steps are done in a machine, which ends with them; one that
// begins with the disk that they have come to runs what the template is to run, and is saved; and a sandbox that is made of what was
// saved proves that it can be used. Until then there is no template. The disks between steps are kept for builds to come.
package templates

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

const (
	// answerTimeout bounds how long envd takes to answer in a machine that has just been started.
	answerTimeout = time.Minute
	// checkTimeout bounds the proof that the network works.
	checkTimeout = 30 * time.Second
	// undoTimeout bounds the removal of a machine.
	undoTimeout = 30 * time.Second
)

// Request asks for a template.
type Request struct {
	// Team owns it; Name is [a-z0-9_-]+, Tag "" the default one.
	Team, Name, Tag string
	// Public: all teams may use it.
	Public bool
	// Image is the one that it is made of, by a name that containerd knows.
	Image string
	// CPUs, MemoryMB and DiskMB (both MiB) are those of its sandboxes. No disk is one of the configured size.
	CPUs, MemoryMB, DiskMB int
	// User and Workdir are the defaults of commands and files; "" is root, and the user's home.
	User, Workdir string
	// Hook is told who each sandbox is before anybody else gets to it; nil is none.
	Hook *db.Hook
	// Run is a command line of the default user's shell that runs when the machine is saved, so that it runs in each sandbox
	// already, and one of that shell's that succeeds when it is ready; "" are none.
	Run, Ready string
	// Start is a command line that is started afresh in each sandbox; "" is none.
	Start string
}

func (r Request) check() error {
	why := ""
	switch {
	case r.CPUs < 1 || r.MemoryMB < 1:
		why = "a template has CPUs and memory"
	case r.Run == "" && r.Ready != "":
		why = "there is no command (--run) that would be ready"
	case r.Hook != nil && r.Run == "":
		why = "there is no command (--run) that would serve the init hook"
	case r.Hook != nil && (r.Hook.Port < 1 || r.Hook.Port > math.MaxUint16 || r.Hook.Port == guests.Port):
		why = fmt.Sprintf("the init hook's port can't be %d", r.Hook.Port)
	case r.Hook != nil && !hookPath.MatchString(r.Hook.Path):
		why = fmt.Sprintf("the init hook's path can't be %q: /WORD/WORD, say, of letters, digits and ._~-", r.Hook.Path)
	default:
		return nil
	}
	return errdefs.ErrInvalidArgument.WithMessage("template " + r.Name + ": " + why)
}

// hookPath are paths that need no escape.
var hookPath = regexp.MustCompile(`^/[A-Za-z0-9/._~-]{0,1000}$`)

// Result is a template that has been made.
type Result struct {
	Template string `json:"template"` // its id
	Build    string `json:"build"`
}

// Machines are those of this host.
type Machines interface {
	Fetch(ctx context.Context, f sandbox.Fetch) (sandbox.Fetched, error)
	Begin(ctx context.Context, b machines.Beginning) (addr netip.Addr, container json.RawMessage, err error)
	Create(ctx context.Context, m lifecycle.Machine) (netip.Addr, error)
	Save(ctx context.Context, id, snapshot string) error
	SaveDisk(ctx context.Context, id, snapshot, before string) (bytes int64, err error)
	Has(ctx context.Context, snapshot string) (bool, error)
	Forget(ctx context.Context, snapshot string) error
	Kill(ctx context.Context, id string) error
	Log(ctx context.Context, id string, q lifecycle.LogQuery) ([]lifecycle.LogEntry, error)
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
	// AdmitBuild sets aside what a machine takes, until done. What there isn't enough of is errdefs.ErrUnavailable.
	AdmitBuild(s admission.Shape) (done func(), err error)
}

// Builder makes templates. All methods may be called from many goroutines.
type Builder struct {
	Config   *config.Config
	Machines Machines
	Guests   Guests
	Layers   Layers
	Room     Room
	Engine   *lifecycle.Engine
	// Version is what templates are said to be made by.
	Version string

	mu    sync.Mutex
	users map[string]int // of layers, by snapshot
}

// Build makes a template of an image, or another build of the one that has the name.
func (b *Builder) Build(ctx context.Context, r Request) (res Result, err error) {
	if _, err := db.ParseRef(r.Name); err != nil {
		return Result{}, err
	}
	if err := r.check(); err != nil {
		return Result{}, err
	}
	if r.User == "" {
		r.User = "root"
	}
	recipe := Recipe{Team: r.Team, Image: r.Image, User: r.User, Workdir: r.Workdir, Run: r.Run, Ready: r.Ready, Start: r.Start, Hook: r.Hook,
		CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB}
	res.Template, res.Build, err = b.Engine.Build(ctx, lifecycle.Build{
		Team: r.Team, Name: r.Name, Tag: r.Tag, Public: r.Public, CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB,
	}, func(ctx context.Context, snapshot string) (db.Settings, int, error) {
		made, err := b.Make(ctx, recipe, nil, func(string, lifecycle.Level, string) {}, snapshot)
		return made.Settings, made.DiskMB, err
	})
	return res, err
}
