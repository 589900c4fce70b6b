// Package container keeps the guest's containers: from their disks to their processes' exits. It knows nothing of the
// protocol that the host speaks, but for the events it reports.
package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/agent/cgroup"
	"github.com/cubesandbox/cube/guest-agent/agent/crun"
	"github.com/cubesandbox/cube/guest-agent/agent/events"
	"github.com/cubesandbox/cube/guest-agent/agent/identity"
	"github.com/cubesandbox/cube/guest-agent/agent/rootfs"
	"github.com/cubesandbox/cube/guest-agent/agent/spec"
	"github.com/cubesandbox/cube/guest-agent/agent/stdio"
	"github.com/cubesandbox/cube/guest-agent/agent/tools"
	"github.com/cubesandbox/cube/guest-agent/agent/volumes"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
)

const (
	// cgroupParent is the cgroup that all containers' are in.
	cgroupParent = "/cube"
	// cleanupTimeout bounds what is still done for a call whose own time may be up.
	cleanupTimeout = 10 * time.Second
	// resolvConfFile is where a container looks for its name servers.
	resolvConfFile = "/etc/resolv.conf"
)

// ids are what containerd calls containers and processes (its pkg/identifiers).
var ids = regexp.MustCompile(`^[A-Za-z0-9]+(?:[._-](?:[A-Za-z0-9]+))*$`)

const maxID = 76

func checkID(what, id string) error {
	if len(id) > maxID || !ids.MatchString(id) {
		return fmt.Errorf("%q is no id of a %s: %w", id, what, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Config is what a Manager works with.
type Config struct {
	Dir     string // where containers' files are; a tmpfs
	Cgroups string // where the cgroup hierarchy is mounted
	Shm     *volumes.Shm
	Tools   *tools.Tools
	Crun    *crun.Runtime
	Events  *events.Log
	// ResolvConf returns the resolv.conf for containers that bring none, empty if the guest has none.
	ResolvConf func() []byte
}

// Manager has all containers. Its methods may be called from many goroutines.
type Manager struct {
	Config

	mu         sync.Mutex
	containers map[string]*Container
	next       int           // the next container's number, which names its directory and cgroup
	thawed     chan struct{} // closed when the containers go on; nil while none has to stand still
}

// NewManager makes a manager without containers.
func NewManager(c Config) (*Manager, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := cgroup.New(c.Cgroups, cgroupParent).Delegate(); err != nil {
		return nil, err
	}
	return &Manager{Config: c, containers: map[string]*Container{}, next: 1}, nil
}

// Create is what a container is made of.
type Create struct {
	ID         string
	Spec       []byte // OCI, as the host sends it
	Rootfs     *api.Rootfs
	Streams    stdio.Streams
	Terminal   bool
	AllDevices bool
	// Files and Shares are what mounts of the specification name.
	Files  []*api.File
	Shares []volumes.Share
	// Namespaces are those that it has in common with other containers.
	Namespaces []*api.Namespace
	// MachineID is for the root, where that has one; "" leaves it.
	MachineID string
}

// Create makes a container whose first process waits for Start. It takes the streams, also when it fails; then nothing
// else is left either.
func (m *Manager) Create(ctx context.Context, r Create) (_ *Container, err error) {
	var c *Container
	defer func() {
		if c != nil {
			close(c.settled)
		}
	}()
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { volumes.Close(r.Shares); return nil })
	if c, err = m.reserve(r.ID); err != nil {
		r.Streams.Close()
		return nil, err
	}
	u.Push(func() error { m.forget(c); return nil })
	io, err := m.streams(r.Streams, r.Terminal)
	if err != nil {
		r.Streams.Close()
		return nil, err
	}
	u.Push(func() error { io.Abandon(); return nil })
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	u.Push(c.clean)
	if c.root, err = rootfs.Mount(ctx, c.dir, r.Rootfs); err != nil {
		return nil, err
	}
	files, resolvConf := r.Files, m.ResolvConf()
	if len(resolvConf) > 0 && c.root.Takes(resolvConfFile) {
		files = append(slices.Clip(files), &api.File{Content: resolvConf, Mode: 0o644})
	}
	if r.MachineID != "" {
		if err := identity.ReplaceMachineID(c.root.Path, r.MachineID); err != nil {
			return nil, err
		}
	}
	if c.volumes, err = volumes.Prepare(ctx, c.dir, files, r.Shares); err != nil {
		return nil, err
	}
	if err := c.writeSpec(ctx, r); err != nil {
		return nil, err
	}
	u.Push(func() error { return c.discard(ctx) })
	started, err := m.Crun.Create(ctx, c.id, c.dir, c.dir, crun.Process{Files: io.Files(), Terminal: r.Terminal})
	if err != nil {
		return nil, err
	}
	p, err := adopt("", started, io, r.Terminal)
	if err != nil {
		return nil, err
	}
	c.created(p, started.Exit)
	return c, nil
}

// reserve makes a container that is being created.
func (m *Manager) reserve(id string) (*Container, error) {
	if err := checkID("container", id); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.containers[id] != nil {
		return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrAlreadyExists)
	}
	n := strconv.Itoa(m.next)
	m.next++
	c := &Container{
		m: m, id: id, state: creating,
		dir:   filepath.Join(m.Dir, n),
		group: cgroup.New(m.Cgroups, filepath.Join(cgroupParent, n)),
		execs: map[string]*process{}, settled: make(chan struct{}), launched: make(chan struct{}),
		ended: make(chan struct{}),
	}
	c.cgroupPath = filepath.Join(cgroupParent, n)
	m.containers[id] = c
	return c, nil
}

func (m *Manager) forget(c *Container) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.containers, c.id)
}

// Get finds a container.
func (m *Manager) Get(id string) (*Container, error) {
	c := m.lookup(id)
	if c == nil {
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}
	return c, nil
}

// lookup finds a container, nil when there is none.
func (m *Manager) lookup(id string) *Container {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.containers[id]
}

// All lists the containers.
func (m *Manager) All() []*Container {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*Container, 0, len(m.containers))
	for _, c := range m.containers {
		all = append(all, c)
	}
	return all
}

// Leave ends all containers and unmounts their disks, for the machine is about to end: nothing else is tidied up. It goes
// on after a failure. A container that is being created has nothing yet that could be lost.
func (m *Manager) Leave(ctx context.Context) error {
	all := m.All()
	errs := make([]error, len(all))
	var leaving sync.WaitGroup
	for i, c := range all {
		if err := c.enter(deleting, created, starting, running, pausing, paused, resuming, stopped); err == nil {
			leaving.Go(func() { errs[i] = c.leave(ctx) })
		}
	}
	leaving.Wait()
	return errors.Join(errs...)
}

func (c *Container) writeSpec(ctx context.Context, r Create) error {
	g := spec.Guest{
		Rootfs: c.root.Path, Cgroup: c.cgroupPath, Terminal: r.Terminal,
		Files: c.volumes.Files[:len(r.Files)], Shares: c.volumes.Shares, Shm: c.m.Shm.Path,
		Tools: func() (string, error) { return c.m.Tools.Path(ctx) },
	}
	if len(c.volumes.Files) > len(r.Files) {
		g.ResolvConf = c.volumes.Files[len(r.Files)]
	}
	var err error
	if g.Join, err = c.m.join(r.Namespaces); err != nil {
		return err
	}
	if r.AllDevices {
		if g.AllDevices, err = spec.Devices("/dev"); err != nil {
			return fmt.Errorf("list devices: %w", err)
		}
	}
	b, err := spec.Container(r.Spec, g)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.dir, "config.json"), b, 0o600)
}
