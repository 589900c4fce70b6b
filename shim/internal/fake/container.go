package fake

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// container is one in the fake guest. Agent.mu guards it.
type container struct {
	request   *api.CreateContainerRequest
	spec      *specs.Spec
	shares    []*mux.Stream
	processes map[string]*process // by exec id; "" is init
	paused    bool
	// pending are the ends that signals bring to processes when they go on.
	pending []func()
	updates []*specs.LinuxResources
}

// kill ends all its processes.
func (c *container) kill(status uint32) {
	for _, p := range c.processes {
		p.kill(status)
	}
}

// container finds one. a.mu is held.
func (a *Agent) container(id string) (*container, error) {
	if c := a.containers[id]; c != nil {
		return c, nil
	}
	return nil, status.Errorf(codes.NotFound, "no container %s", id)
}

// look answers a test's question about a container, with the zero value if there is none.
func look[T any](a *Agent, id string, f func(*container) T) (r T) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.containers[id]; c != nil {
		r = f(c)
	}
	return r
}

// Spec is the OCI spec that a container was created with.
func (a *Agent) Spec(id string) *specs.Spec {
	return look(a, id, func(c *container) *specs.Spec { return c.spec })
}

// Request is what a container was created with.
func (a *Agent) Request(id string) *api.CreateContainerRequest {
	return look(a, id, func(c *container) *api.CreateContainerRequest { return c.request })
}

// Shares are the streams to the servers of a container's shares.
func (a *Agent) Shares(id string) []*mux.Stream {
	return look(a, id, func(c *container) []*mux.Stream { return c.shares })
}

// Updates are the resources that a container was given after its creation.
func (a *Agent) Updates(id string) []*specs.LinuxResources {
	return look(a, id, func(c *container) []*specs.LinuxResources { return append([]*specs.LinuxResources(nil), c.updates...) })
}

// Paused tells whether a container stands still.
func (a *Agent) Paused(id string) bool {
	return look(a, id, func(c *container) bool { return c.paused })
}

// Size is the size that a process's terminal was given.
func (a *Agent) Size(id, execID string) string {
	return look(a, id, func(c *container) string {
		if p := c.processes[execID]; p != nil {
			return p.size
		}
		return ""
	})
}

// mounts tells whether a container has the disk mounted.
func (a *Agent) mounts(serial string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.containers {
		for _, d := range c.request.Rootfs.GetDisks() {
			if d.Serial == serial {
				return true
			}
		}
	}
	return false
}

// CreateContainer implements the API.
func (a *Agent) CreateContainer(_ context.Context, r *api.CreateContainerRequest) (*api.ProcessResponse, error) {
	a.mu.Lock()
	held := a.held[r.Id]
	a.mu.Unlock()
	if held != nil {
		<-held
	}
	c := &container{request: r, spec: &specs.Spec{}, processes: map[string]*process{}}
	if err := json.Unmarshal(r.Spec, c.spec); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	for _, d := range r.Rootfs.Disks {
		if !a.machine.hasDisk(d.Serial) {
			return nil, status.Errorf(codes.NotFound, "no disk %s", d.Serial)
		}
	}
	for _, s := range r.Shares {
		st, err := a.take(s.Stream)
		if err != nil {
			return nil, err
		}
		c.shares = append(c.shares, st)
	}
	init, err := a.newProcess(r.Id, "", c.spec.Process, r.Stdio)
	if err != nil {
		return nil, err
	}
	c.processes[""] = init
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.containers[r.Id] != nil {
		return nil, status.Errorf(codes.AlreadyExists, "container %s exists", r.Id)
	}
	for _, ns := range r.Namespaces {
		if ns.Container == "" && ns.Type != "pid" {
			continue // the guest's
		}
		if other := a.containers[ns.Container]; other == nil || other.processes[""].over() {
			return nil, status.Errorf(codes.FailedPrecondition, "container %s doesn't run", ns.Container)
		}
	}
	a.containers[r.Id] = c
	return &api.ProcessResponse{Pid: 1}, nil
}

// StartContainer implements the API.
func (a *Agent) StartContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	c, err := a.container(r.Id)
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	p := c.processes[""]
	if err := p.startable(); err != nil {
		return nil, err
	}
	go p.run()
	return &emptypb.Empty{}, nil
}

// ExecProcess implements the API.
func (a *Agent) ExecProcess(_ context.Context, r *api.ExecProcessRequest) (*api.ProcessResponse, error) {
	var s specs.Process
	if err := json.Unmarshal(r.Process, &s); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	p, err := a.newProcess(r.Id, r.ExecId, &s, r.Stdio)
	if err != nil {
		return nil, err
	}
	if err := p.startable(); err != nil {
		return nil, err
	}
	if r.Columns != 0 {
		p.size = fmt.Sprintf("%dx%d", r.Columns, r.Rows)
	}
	if err := a.addExec(r.Id, p); err != nil {
		p.close()
		return nil, err
	}
	go p.run()
	if a.HoldExec != nil {
		<-a.HoldExec
	}
	return &api.ProcessResponse{Pid: 2}, nil
}

func (a *Agent) addExec(id string, p *process) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, err := a.container(id)
	switch {
	case err != nil:
		return err
	case c.processes[""].over():
		return status.Error(codes.FailedPrecondition, "the container has stopped")
	case c.paused:
		return status.Error(codes.FailedPrecondition, "the container is paused")
	}
	c.processes[p.execID] = p
	return nil
}

// SignalProcess implements the API.
func (a *Agent) SignalProcess(_ context.Context, r *api.SignalProcessRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, err := a.container(r.Id)
	if err != nil {
		return nil, err
	}
	p := c.processes[r.ExecId]
	if p == nil || p.over() {
		return nil, status.Error(codes.NotFound, "process already finished")
	}
	deliver := func() { p.kill(128 + r.Signal) }
	if r.All {
		deliver = func() { c.kill(128 + r.Signal) }
	}
	if c.paused && r.Signal != uint32(unix.SIGKILL) {
		c.pending = append(c.pending, deliver)
	} else {
		deliver()
	}
	return &emptypb.Empty{}, nil
}

// PauseContainer implements the API.
func (a *Agent) PauseContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, err := a.container(r.Id)
	if err != nil {
		return nil, err
	}
	c.paused = true
	return &emptypb.Empty{}, nil
}

// ResumeContainer implements the API.
func (a *Agent) ResumeContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, err := a.container(r.Id)
	if err != nil {
		return nil, err
	}
	c.paused = false
	a.changed.Broadcast()
	for _, deliver := range c.pending {
		deliver()
	}
	c.pending = nil
	return &emptypb.Empty{}, nil
}

// UpdateContainer implements the API.
func (a *Agent) UpdateContainer(_ context.Context, r *api.UpdateContainerRequest) (*emptypb.Empty, error) {
	res := &specs.LinuxResources{}
	if err := json.Unmarshal(r.Resources, res); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c, err := a.container(r.Id)
	if err != nil {
		return nil, err
	}
	c.updates = append(c.updates, res)
	return &emptypb.Empty{}, nil
}

// ResizePty implements the API.
func (a *Agent) ResizePty(_ context.Context, r *api.ResizePtyRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, err := a.container(r.Id)
	if err != nil {
		return nil, err
	}
	p := c.processes[r.ExecId]
	if p == nil {
		return nil, status.Error(codes.NotFound, "no such process")
	}
	p.size = fmt.Sprintf("%dx%d", r.Columns, r.Rows)
	return &emptypb.Empty{}, nil
}

// ListPids implements the API.
func (a *Agent) ListPids(context.Context, *api.ContainerRequest) (*api.ListPidsResponse, error) {
	return &api.ListPidsResponse{Pids: []uint32{1}}, nil
}

// Stats implements the API.
func (a *Agent) Stats(context.Context, *api.ContainerRequest) (*api.StatsResponse, error) {
	b, err := proto.Marshal(&stats.Metrics{Memory: &stats.MemoryStat{Usage: 4096}})
	return &api.StatsResponse{Metrics: b}, err
}

// DeleteContainer implements the API.
func (a *Agent) DeleteContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.containers[r.Id]; c != nil {
		c.kill(137)
		for _, s := range c.shares {
			s.Close()
		}
		delete(a.containers, r.Id)
	}
	return &emptypb.Empty{}, nil
}
