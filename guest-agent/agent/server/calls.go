package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/agent/container"
	"github.com/cubesandbox/cube/guest-agent/agent/identity"
	"github.com/cubesandbox/cube/guest-agent/agent/network"
	"github.com/cubesandbox/cube/guest-agent/api"
)

// machineID is where the guest's machine-id(5) is.
const machineID = "/etc/machine-id"

// errNoIdentity says that the session has to begin with Configure.
var errNoIdentity = fmt.Errorf("the guest has no identity yet: %w", errdefs.ErrFailedPrecondition)

var empty = &emptypb.Empty{}

func (s *service) Configure(_ context.Context, r *api.ConfigureRequest) (*api.ConfigureResponse, error) {
	nic, err := network.Parse(r.Network)
	if err != nil {
		return nil, err
	}
	first, setClock := !s.configured.Load(), identity.CorrectClock
	if first {
		setClock = identity.SetClock
	}
	restored := first && len(s.Containers.All()) > 0
	// The clock ages while the rest is done, so what takes time comes after it.
	if err := errors.Join(
		identity.Reseed(r.Entropy),
		identity.SetHostname(r.Hostname),
		identity.SetMachineID(machineID, r.SandboxId),
		setClock(time.Unix(0, r.UnixNanos)),
		endConnections(restored),
		s.Card.Configure(nic, first),
	); err != nil {
		return nil, err
	}
	var u unix.Utsname
	var info unix.Sysinfo_t
	if err := errors.Join(unix.Uname(&u), unix.Sysinfo(&info)); err != nil {
		return nil, err
	}
	s.configured.Store(true)
	return &api.ConfigureResponse{
		AgentVersion: s.Version,
		Kernel:       unix.ByteSliceToString(u.Release[:]),
		MemoryBytes:  info.Totalram * uint64(info.Unit),
	}, nil
}

// endConnections ends those of a machine that goes on elsewhere: whoever is at their other ends has gone on without it.
func endConnections(restored bool) error {
	if !restored {
		return nil
	}
	return network.EndConnections()
}

func (s *service) SetTime(_ context.Context, r *api.SetTimeRequest) (*emptypb.Empty, error) {
	return empty, identity.CorrectClock(time.Unix(0, r.UnixNanos))
}

func (s *service) CreateContainer(ctx context.Context, r *api.CreateContainerRequest) (*api.ProcessResponse, error) {
	if !s.configured.Load() {
		return nil, errNoIdentity
	}
	streams, err := s.streams(r.Stdio)
	if err != nil {
		return nil, err
	}
	shares, err := s.shares(r.Shares)
	if err != nil {
		streams.Close()
		return nil, err
	}
	c, err := s.Containers.Create(ctx, container.Create{
		ID:         r.Id,
		Spec:       r.Spec,
		Rootfs:     r.Rootfs,
		Streams:    streams,
		Terminal:   r.Stdio.GetTerminal(),
		AllDevices: r.PrivilegedDevices,
		Files:      r.Files,
		Shares:     shares,
		Namespaces: r.Namespaces,
		MachineID:  r.MachineId,
	})
	if err != nil {
		return nil, err
	}
	return &api.ProcessResponse{Pid: uint32(c.PID())}, nil
}

func (s *service) ExecProcess(ctx context.Context, r *api.ExecProcessRequest) (*api.ProcessResponse, error) {
	streams, err := s.streams(r.Stdio)
	if err != nil {
		return nil, err
	}
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		streams.Close()
		return nil, err
	}
	pid, err := c.Exec(ctx, container.Exec{
		ID:       r.ExecId,
		Process:  r.Process,
		Streams:  streams,
		Terminal: r.Stdio.GetTerminal(),
		Columns:  r.Columns,
		Rows:     r.Rows,
	})
	if err != nil {
		return nil, err
	}
	return &api.ProcessResponse{Pid: uint32(pid)}, nil
}

func (s *service) StartContainer(ctx context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, c.Start(ctx)
}

func (s *service) SignalProcess(_ context.Context, r *api.SignalProcessRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, c.Signal(r.ExecId, unix.Signal(r.Signal), r.All)
}

func (s *service) ResizePty(_ context.Context, r *api.ResizePtyRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, c.Resize(r.ExecId, uint16(r.Columns), uint16(r.Rows))
}

func (s *service) ListPids(_ context.Context, r *api.ContainerRequest) (*api.ListPidsResponse, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	pids, err := c.Processes()
	if err != nil {
		return nil, err
	}
	answer := &api.ListPidsResponse{}
	for _, pid := range pids {
		answer.Pids = append(answer.Pids, uint32(pid))
	}
	return answer, nil
}

func (s *service) Stats(_ context.Context, r *api.ContainerRequest) (*api.StatsResponse, error) {
	stats := s.Containers.Stats
	if r.Id != "" {
		c, err := s.Containers.Get(r.Id)
		if err != nil {
			return nil, err
		}
		stats = c.Stats
	}
	b, err := stats()
	if err != nil {
		return nil, err
	}
	return &api.StatsResponse{Metrics: b}, nil
}

func (s *service) DeleteContainer(ctx context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if errors.Is(err, errdefs.ErrNotFound) {
		return empty, nil
	}
	if err != nil {
		return nil, err
	}
	return empty, c.Delete(ctx)
}

func (s *service) Events(ctx context.Context, r *api.EventsRequest, stream api.Agent_EventsServer) (err error) {
	defer recoverInto(&err, "Events")
	return toStatus(s.Guest.Events.Follow(ctx, r.After, stream.Send))
}

func (s *service) PauseContainer(ctx context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, c.Pause(ctx)
}

func (s *service) ResumeContainer(ctx context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, c.Resume(ctx)
}

func (s *service) UpdateContainer(ctx context.Context, r *api.UpdateContainerRequest) (*emptypb.Empty, error) {
	c, err := s.Containers.Get(r.Id)
	if err != nil {
		return nil, err
	}
	return empty, c.Update(ctx, r.Resources)
}
