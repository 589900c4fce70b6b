// Package templates makes templates of images: a machine is started from the image, envd answers in it, the machine is saved,
// and a sandbox that is made of what was saved proves that it can be used. Until then there is no template.
package templates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/spec"
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

// Builder makes templates.
type Builder struct {
	Config   *config.Config
	Client   *sandbox.Client
	Machines *machines.Machines
	Guests   *guests.Guests
	Engine   *lifecycle.Engine
}

// Build makes a template, or another build of the one that has the name.
func (b *Builder) Build(ctx context.Context, r Request) (_ Result, err error) {
	if _, err := db.ParseRef(r.Name); err != nil {
		return Result{}, err
	}
	if err := r.check(); err != nil {
		return Result{}, err
	}
	if r.DiskMB == 0 {
		r.DiskMB = int(b.Config.Store.DiskSize >> 20)
	}
	if r.User == "" {
		r.User = "root"
	}
	var u undo.Stack
	defer u.Run(&err)
	container, remove, err := b.start(ctx, &u, r)
	if err != nil {
		return Result{}, fmt.Errorf("template %s: %w", r.Name, err)
	}
	settings := db.Settings{EnvdVersion: container.version, User: r.User, Workdir: r.Workdir, Hook: r.Hook, Start: r.Start, Container: container.blueprint}
	var res Result
	res.Template, res.Build, err = b.Engine.Build(ctx, lifecycle.Build{
		Team: r.Team, Name: r.Name, Tag: r.Tag, Public: r.Public, CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB, Settings: settings,
	}, func(ctx context.Context, snapshot string) error {
		if err := b.Machines.Save(ctx, container.id, snapshot); err != nil {
			return err
		}
		if err := remove(); err != nil {
			return err
		}
		return b.prove(ctx, r, snapshot, settings)
	})
	return res, err
}

// origin is the machine that a template is saved of.
type origin struct {
	id        string
	version   string // envd's
	blueprint json.RawMessage
}

// start starts the machine. remove removes it, as u does otherwise.
func (b *Builder) start(ctx context.Context, u *undo.Stack, r Request) (o origin, remove func() error, err error) {
	o.id = "template-" + uuid.NewString()
	settings, err := machines.Settings(lifecycle.Egress{})
	if err != nil {
		return o, nil, err
	}
	entry := sandbox.Envd
	_, err = b.Client.RunDetached(ctx, sandbox.Spec{
		ID: o.id, Image: r.Image, Entrypoint: &entry,
		Process: sandbox.Process{Args: command(r), User: "root", Cwd: "/"},
		Disk:    int64(r.DiskMB) << 20,
		Annotations: map[string]string{
			spec.VCPUs: strconv.Itoa(r.CPUs), spec.Memory: strconv.Itoa(r.MemoryMB) + "MiB",
		},
		Labels: map[string]string{machines.Label: r.Team}, Whole: true, Network: settings,
	}, nil)
	if err != nil {
		return o, nil, err
	}
	remove = b.remover(ctx, o.id)
	u.Push(remove)
	blueprint, err := b.Client.Blueprint(ctx, o.id)
	if err != nil {
		return o, nil, err
	}
	if o.blueprint, err = json.Marshal(blueprint); err != nil {
		return o, nil, err
	}
	seen, err := b.Machines.Look(ctx, o.id)
	if err != nil {
		return o, nil, err
	}
	if seen.State != lifecycle.Runs {
		return o, nil, errdefs.ErrFailedPrecondition.WithMessage("its machine has ended: " + seen.Why)
	}
	if err := b.introduce(ctx, seen.Addr, r.User, r.Workdir); err != nil {
		return o, nil, err
	}
	if o.version, err = b.Guests.Version(ctx, seen.Addr); err != nil {
		return o, nil, err
	}
	rctx, cancel := context.WithTimeout(ctx, b.Config.Timeout(readyTimeout))
	defer cancel()
	if err := b.await(rctx, seen.Addr, r); err != nil {
		return o, nil, errors.Join(err, b.said(ctx, o.id))
	}
	return o, remove, nil
}

func (b *Builder) remover(ctx context.Context, id string) func() error {
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Config.Timeout(undoTimeout))
		defer cancel()
		return b.Machines.Kill(ctx, id)
	}
}

// introduce waits for envd to take what it is told.
func (b *Builder) introduce(ctx context.Context, addr netip.Addr, user, workdir string) error {
	ctx, cancel := context.WithTimeout(ctx, b.Config.Timeout(answerTimeout))
	defer cancel()
	if err := b.Guests.Init(ctx, addr, lifecycle.Init{User: user, Workdir: workdir}); err != nil {
		return fmt.Errorf("envd: %w", err)
	}
	return nil
}

// check is a command line that succeeds where the name server that the sandbox has been given answers, whatever it says, and
// takes a connection.
const check = `
set -e
read -r _ server < <(grep '^nameserver ' /etc/resolv.conf)
# A query of the root's name servers: id 1, recursion desired, one question, no name, type NS, class IN.
exec 3<>"/dev/udp/$server/53"
for n in 1 2 3; do
	printf '\0\1\1\0\0\1\0\0\0\0\0\0\0\0\2\0\1' >&3
	got=$(timeout 5 head -c 12 <&3 | wc -c) || true
	[ "$got" != 12 ] || break
done
[ "$got" = 12 ] || { echo "the name server $server doesn't answer"; exit 1; }
timeout 5 bash -c "exec 4<>/dev/tcp/$server/53" || { echo "no TCP connection to $server"; exit 1; }
`

// prove makes a sandbox of the snapshot and uses it.
func (b *Builder) prove(ctx context.Context, r Request, snapshot string, s db.Settings) (err error) {
	id := "template-" + uuid.NewString()
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	u.Push(b.remover(ctx, id))
	addr, err := b.Machines.Create(ctx, lifecycle.Machine{ID: id, Team: r.Team, Snapshot: snapshot, Container: s.Container})
	if err != nil {
		return fmt.Errorf("no sandbox can be made of it: %w", err)
	}
	if err := b.introduce(ctx, addr, s.User, s.Workdir); err != nil {
		return fmt.Errorf("a sandbox that was made of it: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, b.Config.Timeout(checkTimeout))
	defer cancel()
	if _, err := b.Guests.Run(ctx, addr, "", check); err != nil {
		return fmt.Errorf("a sandbox that was made of it can't use the network: %w", err)
	}
	if err := b.await(ctx, addr, r); err != nil {
		return fmt.Errorf("a sandbox that was made of it: %w", err)
	}
	return nil
}
