// Package task is containerd's ttrpc Task service, version 3: it decodes requests for package pod, and encodes what
// comes back.
package task

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cubesandbox/cube/shim/internal/answer"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/stdio"
)

// Service answers for one pod.
type Service struct {
	pod      *pod.Pod
	shutdown shutdown.Service
	log      *slog.Logger
	// socket is what containerd connects to; it is removed before the last answer.
	socket string
}

var _ taskapi.TTRPCTaskService = (*Service)(nil)

var empty = &emptypb.Empty{}

// NewService makes the service. socket is the path it is reached at, "" if it has none.
func NewService(p *pod.Pod, sd shutdown.Service, log *slog.Logger, socket string) *Service {
	return &Service{pod: p, shutdown: sd, log: log, socket: socket}
}

// RegisterTTRPC implements pkg/shim's TTRPCService.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) error {
	taskapi.RegisterTTRPCTaskService(server, s)
	return nil
}

// Create makes the machine and the container.
func (s *Service) Create(ctx context.Context, r *taskapi.CreateTaskRequest) (*taskapi.CreateTaskResponse, error) {
	began := time.Now()
	req, err := createRequest(r)
	if err != nil {
		return nil, answer.Error(err)
	}
	pid, err := s.pod.Create(ctx, req)
	if err != nil {
		s.log.Error("create", "id", r.ID, "error", err)
		return nil, answer.Error(answer.ForCreate(err))
	}
	s.log.Debug("create", "id", r.ID, "pid", pid, "took", time.Since(began))
	return &taskapi.CreateTaskResponse{Pid: uint32(pid)}, nil
}

func createRequest(r *taskapi.CreateTaskRequest) (pod.CreateRequest, error) {
	if err := identifiers.Validate(r.ID); err != nil {
		return pod.CreateRequest{}, errdefs.ErrInvalidArgument.WithMessage(err.Error())
	}
	o, err := runtimeOptions(r.Options)
	if err != nil {
		return pod.CreateRequest{}, err
	}
	return pod.CreateRequest{
		ID:         r.ID,
		Bundle:     r.Bundle,
		Rootfs:     r.Rootfs,
		Stdio:      stdio.Config{Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, Terminal: r.Terminal},
		ConfigFile: o.GetConfigPath(),
		Config:     o.GetConfigBody(),
		Checkpoint: r.Checkpoint,
	}, nil
}

// runtimeOptions are those of a runtime that containerd knows nothing of; nil where there are none. Those of runc, which
// ctr always sends, mean nothing here.
func runtimeOptions(any *anypb.Any) (*runtimeoptions.Options, error) {
	o := &runtimeoptions.Options{}
	if any == nil || !typeurl.Is(any, o) {
		return nil, nil
	}
	if err := typeurl.UnmarshalTo(any, o); err != nil {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("runtime options: %v", err))
	}
	return o, nil
}

// Start starts init or an exec.
func (s *Service) Start(ctx context.Context, r *taskapi.StartRequest) (*taskapi.StartResponse, error) {
	began := time.Now()
	pid, err := s.pod.Start(ctx, r.ID, r.ExecID)
	if err != nil {
		return nil, answer.Error(err)
	}
	s.log.Debug("start", "id", r.ID, "exec", r.ExecID, "took", time.Since(began))
	return &taskapi.StartResponse{Pid: uint32(pid)}, nil
}

// Exec adds a process.
func (s *Service) Exec(_ context.Context, r *taskapi.ExecProcessRequest) (*emptypb.Empty, error) {
	if err := identifiers.Validate(r.ExecID); err != nil {
		return nil, answer.Error(errdefs.ErrInvalidArgument.WithMessage(err.Error()))
	}
	config := stdio.Config{Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, Terminal: r.Terminal}
	if err := s.pod.Exec(r.ID, r.ExecID, r.Spec.GetValue(), config); err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

var statuses = map[pod.State]tasktypes.Status{
	pod.Created:  tasktypes.Status_CREATED,
	pod.Starting: tasktypes.Status_CREATED,
	pod.Running:  tasktypes.Status_RUNNING,
	pod.Pausing:  tasktypes.Status_PAUSING,
	pod.Paused:   tasktypes.Status_PAUSED,
	pod.Stopped:  tasktypes.Status_STOPPED,
	pod.Deleted:  tasktypes.Status_STOPPED,
}

// State tells about a process, from memory.
func (s *Service) State(_ context.Context, r *taskapi.StateRequest) (*taskapi.StateResponse, error) {
	st, err := s.pod.State(r.ID, r.ExecID)
	if err != nil {
		return nil, answer.Error(err)
	}
	resp := &taskapi.StateResponse{
		ID:         r.ID,
		ExecID:     r.ExecID,
		Bundle:     st.Bundle,
		Pid:        uint32(st.PID),
		Status:     statuses[st.State],
		Stdin:      st.Stdio.Stdin,
		Stdout:     st.Stdio.Stdout,
		Stderr:     st.Stdio.Stderr,
		Terminal:   st.Stdio.Terminal,
		ExitStatus: st.Exit.Status,
		ExitedAt:   timestamp(st.Exit.At),
	}
	if r.ExecID != "" {
		resp.ID = r.ExecID
	}
	return resp, nil
}

// Kill sends a signal.
func (s *Service) Kill(ctx context.Context, r *taskapi.KillRequest) (*emptypb.Empty, error) {
	if err := s.pod.Kill(ctx, r.ID, r.ExecID, r.Signal, r.All); err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

// Wait waits for a process's exit.
func (s *Service) Wait(ctx context.Context, r *taskapi.WaitRequest) (*taskapi.WaitResponse, error) {
	exit, err := s.pod.Wait(ctx, r.ID, r.ExecID)
	if err != nil {
		return nil, answer.Error(err)
	}
	return &taskapi.WaitResponse{ExitStatus: exit.Status, ExitedAt: timestamp(exit.At)}, nil
}

// Delete forgets a process, and with init the container and its machine.
func (s *Service) Delete(ctx context.Context, r *taskapi.DeleteRequest) (*taskapi.DeleteResponse, error) {
	defer s.pod.Answer()()
	began := time.Now()
	pid, exit, err := s.pod.Delete(ctx, r.ID, r.ExecID)
	if err != nil {
		return nil, answer.Error(err)
	}
	s.log.Debug("delete", "id", r.ID, "exec", r.ExecID, "took", time.Since(began))
	return &taskapi.DeleteResponse{Pid: uint32(pid), ExitStatus: exit.Status, ExitedAt: timestamp(exit.At)}, nil
}

// Pids lists the processes; all have the machine's pid.
func (s *Service) Pids(_ context.Context, r *taskapi.PidsRequest) (*taskapi.PidsResponse, error) {
	list, err := s.pod.Pids(r.ID)
	if err != nil {
		return nil, answer.Error(err)
	}
	resp := &taskapi.PidsResponse{}
	for _, p := range list {
		info := &tasktypes.ProcessInfo{Pid: uint32(p.PID)}
		if p.ExecID != "" {
			if info.Info, err = typeurl.MarshalAnyToProto(&options.ProcessDetails{ExecID: p.ExecID}); err != nil {
				return nil, answer.Error(err)
			}
		}
		resp.Processes = append(resp.Processes, info)
	}
	return resp, nil
}

// ResizePty sets the size of a terminal.
func (s *Service) ResizePty(ctx context.Context, r *taskapi.ResizePtyRequest) (*emptypb.Empty, error) {
	if err := s.pod.Resize(ctx, r.ID, r.ExecID, r.Width, r.Height); err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

// CloseIO ends a process's input.
func (s *Service) CloseIO(_ context.Context, r *taskapi.CloseIORequest) (*emptypb.Empty, error) {
	if !r.Stdin {
		return empty, nil
	}
	if err := s.pod.CloseIO(r.ID, r.ExecID); err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

// Stats tells what the container uses.
func (s *Service) Stats(ctx context.Context, r *taskapi.StatsRequest) (*taskapi.StatsResponse, error) {
	b, err := s.pod.Stats(ctx, r.ID)
	if err != nil {
		return nil, answer.Error(err)
	}
	any, err := answer.Metrics(b)
	if err != nil {
		return nil, answer.Error(fmt.Errorf("metrics of container %s: %w", r.ID, err))
	}
	return &taskapi.StatsResponse{Stats: any}, nil
}

// Connect tells the pids; of a task that isn't there, 0.
func (s *Service) Connect(_ context.Context, r *taskapi.ConnectRequest) (*taskapi.ConnectResponse, error) {
	return &taskapi.ConnectResponse{ShimPid: uint32(os.Getpid()), TaskPid: uint32(s.pod.PID(r.ID)), Version: "3"}, nil
}

// Shutdown ends the shim if it serves no container. An error would make containerd repeat the delete, so there is none.
func (s *Service) Shutdown(ctx context.Context, r *taskapi.ShutdownRequest) (*emptypb.Empty, error) {
	if s.pod.Retire(ctx, r.ID, s.hide) {
		s.shutdown.Shutdown()
	}
	return empty, nil
}

// hide removes the socket: containerd removes the bundle as soon as it has the answer.
func (s *Service) hide() {
	if s.socket != "" {
		os.Remove(s.socket) // `shim delete` tries again
	}
}

// Pause makes a container's processes stand still.
func (s *Service) Pause(ctx context.Context, r *taskapi.PauseRequest) (*emptypb.Empty, error) {
	if err := s.pod.Pause(ctx, r.ID); err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

// Resume lets them go on.
func (s *Service) Resume(ctx context.Context, r *taskapi.ResumeRequest) (*emptypb.Empty, error) {
	if err := s.pod.Resume(ctx, r.ID); err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

// Update changes a container's limits.
func (s *Service) Update(ctx context.Context, r *taskapi.UpdateTaskRequest) (*emptypb.Empty, error) {
	resources, err := resourcesOf(r.Resources)
	if err == nil {
		err = s.pod.Update(ctx, r.ID, resources)
	}
	if err != nil {
		return nil, answer.Error(err)
	}
	return empty, nil
}

// resourcesOf decodes what containerd passes on of an update: specs.LinuxResources, in JSON.
func resourcesOf(any *anypb.Any) (*specs.LinuxResources, error) {
	if len(any.GetValue()) == 0 {
		return nil, nil
	}
	var r specs.LinuxResources
	if err := json.Unmarshal(any.Value, &r); err != nil {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the update is not a container's resources: %v", err))
	}
	return &r, nil
}

// Checkpoint saves a container's machine, and leaves in the given directory what names the snapshot. Of runc's options
// exit counts; the rest is about what CRIU can't do.
func (s *Service) Checkpoint(ctx context.Context, r *taskapi.CheckpointTaskRequest) (*emptypb.Empty, error) {
	began := time.Now()
	o := &options.CheckpointOptions{}
	if r.Options != nil && typeurl.Is(r.Options, o) {
		if err := typeurl.UnmarshalTo(r.Options, o); err != nil {
			return nil, answer.Error(errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("checkpoint options: %v", err)))
		}
	}
	if err := s.pod.Checkpoint(ctx, r.ID, r.Path, o.Exit); err != nil {
		return nil, answer.Error(err)
	}
	s.log.Debug("checkpoint", "id", r.ID, "took", time.Since(began))
	return empty, nil
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
