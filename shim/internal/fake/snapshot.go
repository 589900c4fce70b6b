package fake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
	"github.com/cubesandbox/cube/vmm"
)

// sleeper is a saved machine. Its number is what is in the file of its state.
type sleeper struct {
	shape      vmm.Shape
	serials    map[string]bool
	containers map[string]*container // their processes only by what they ran, and how far they were
	events     []*api.Event
}

// freezeLimit is how long a guest may take to come to rest, and to go on.
const freezeLimit = 300 * time.Millisecond

// Save implements vmm.Machine. A guest that doesn't come to rest in time is saved as it is.
func (m *Machine) Save(ctx context.Context, r vmm.SaveRequest) (_ *vmm.Saved, err error) {
	m.saves.Lock() // one at a time
	defer m.saves.Unlock()
	if m.Paused() {
		return nil, errors.New("it is paused: resume it first")
	}
	goOn := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), freezeLimit)
		defer cancel()
		_ = r.Quiesce.Thaw(ctx) // no error of the save
		return nil
	}
	defer func() {
		if err != nil || !r.Still {
			err = errors.Join(err, goOn())
		}
	}()
	limited, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	err = r.Quiesce.Freeze(limited)
	frozen := err == nil
	if err != nil && (limited.Err() == nil || ctx.Err() != nil) {
		return nil, err
	}
	l := m.launcher
	if l.Saving != nil {
		l.Saving(ctx)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case <-m.done:
		return nil, vmm.ErrGone
	default:
	}
	l.mu.Lock()
	n := len(l.saved)
	l.saved = append(l.saved, m.sleeper(frozen))
	l.mu.Unlock()
	if !r.DisksOnly {
		memory := filepath.Join(r.Dir, vmm.MemoryFile)
		err = errors.Join(
			os.WriteFile(filepath.Join(r.Dir, vmm.StateFile), []byte(strconv.Itoa(n)), 0o600),
			os.WriteFile(memory, nil, 0o600),
			os.Truncate(memory, int64(m.Shape().MemoryMiB)<<20))
	}
	root := vmm.SavedDisk{Serial: vmm.RootSerial, Placeholder: l.RootImage == nil}
	if !root.Placeholder {
		err = errors.Join(err, os.WriteFile(filepath.Join(r.Dir, vmm.DiskFile(root.Serial)), l.RootImage, 0o600))
	}
	saved := &vmm.Saved{
		Platform: vmm.Platform{QEMU: "fake", Guest: "fake"},
		Shape:    m.Shape(),
		Parent:   m.Snapshot,
		Disks:    []vmm.SavedDisk{root},
		Frozen:   frozen,
	}
	if r.Still {
		saved.GoOn = goOn
	}
	return saved, err
}

func (m *Machine) sleeper(frozen bool) *sleeper {
	a := m.Guest
	s := &sleeper{shape: m.Shape(), containers: map[string]*container{}}
	m.mu.Lock()
	s.serials = maps.Clone(m.serials)
	m.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if frozen && !a.resting {
		panic("the work is not at rest")
	}
	s.events = slices.Clone(a.events)
	for id, c := range a.containers {
		s.containers[id] = c.copy(nil)
	}
	return s
}

// copy is the container in another machine's guest.
func (c *container) copy(a *Agent) *container {
	n := &container{request: c.request, spec: c.spec, paused: c.paused, processes: map[string]*process{}}
	for id, p := range c.processes {
		if p.over() {
			continue
		}
		q := &process{agent: a, container: p.container, execID: id, args: p.args, size: p.size, signal: make(chan struct{})}
		q.count.Store(p.count.Load())
		n.processes[id] = q
	}
	return n
}

// restore has the machine go on from the snapshot that it is asked for.
func (l *Launcher) restore(m *Machine) error {
	b, err := os.ReadFile(filepath.Join(l.Snapshots, m.Snapshot, vmm.StateFile))
	if errors.Is(err, os.ErrNotExist) {
		return errdefs.ErrNotFound.WithMessage("there is no snapshot " + m.Snapshot)
	}
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(string(b))
	if err != nil {
		return err
	}
	l.mu.Lock()
	s := l.saved[n]
	l.mu.Unlock()
	if m.Request.Shape != (vmm.Shape{}) || m.Root != nil {
		return fmt.Errorf("a machine of a snapshot is asked for with %s and root %v", m.Request.Shape, m.Root)
	}
	if err := os.WriteFile(filepath.Join(m.DiskDir, vmm.DiskFile(vmm.RootSerial)), nil, 0o600); err != nil {
		return err
	}
	m.Request.Shape, m.serials = s.shape, maps.Clone(s.serials)
	a := m.Guest
	a.resting, a.asleep, a.events = true, true, slices.Clone(s.events)
	for id, c := range s.containers {
		a.containers[id] = c.copy(a)
	}
	return nil
}

// Freeze implements the API.
func (a *Agent) Freeze(context.Context, *api.FreezeRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.resting {
		return nil, status.Error(codes.FailedPrecondition, "at rest already")
	}
	a.resting = true
	return &emptypb.Empty{}, nil
}

// Thaw implements the API.
func (a *Agent) Thaw(context.Context, *api.ThawRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.identity == nil {
		return nil, status.Error(codes.FailedPrecondition, "no identity yet")
	}
	if a.asleep {
		for _, c := range a.containers {
			for _, p := range c.processes {
				go p.run()
			}
		}
	}
	a.resting, a.asleep = false, false
	return &emptypb.Empty{}, nil
}

// AttachProcess implements the API.
func (a *Agent) AttachProcess(_ context.Context, r *api.AttachProcessRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	c, resting := a.containers[r.Id], a.resting
	a.mu.Unlock()
	if c == nil || c.processes[r.ExecId] == nil || !resting {
		return nil, status.Error(codes.NotFound, "no such process at rest")
	}
	p := c.processes[r.ExecId]
	for id, to := range map[uint32]**mux.Stream{r.Stdio.GetStdin(): &p.stdin, r.Stdio.GetStdout(): &p.stdout, r.Stdio.GetStderr(): &p.stderr} {
		if id == 0 {
			continue
		}
		st, err := a.take(id)
		if err != nil {
			return nil, err
		}
		*to = st
	}
	return &emptypb.Empty{}, nil
}

// IdentifyContainer implements the API.
func (a *Agent) IdentifyContainer(_ context.Context, r *api.IdentifyContainerRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.containers[r.Id] == nil || !a.resting {
		return nil, status.Error(codes.NotFound, "no such container at rest")
	}
	return &emptypb.Empty{}, nil
}

// Resting tells whether the work is at rest.
func (a *Agent) Resting() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.resting
}
