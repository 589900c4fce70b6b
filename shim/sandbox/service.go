// Package sandbox is containerd's ttrpc Sandbox service, version 1: a pod whose machine is there before its containers,
// and stays until it is told to end. It decodes requests for package pod, and encodes what comes back. The containers are
// package task's.
package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cubesandbox/cube/shim/internal/answer"
	"github.com/cubesandbox/cube/shim/pod"
)

// The states as Kubernetes calls them; containerd passes them on.
const (
	ready    = "SANDBOX_READY"
	notReady = "SANDBOX_NOTREADY"
)

// Service answers for one pod.
type Service struct {
	pod      *pod.Pod
	config   string // the file, "" for the default one
	shutdown shutdown.Service
	log      *slog.Logger
	// socket is what containerd connects to; it is removed before the last answer.
	socket string

	mu  sync.Mutex
	box *box // nil before CreateSandbox
}

var _ sandboxapi.TTRPCSandboxService = (*Service)(nil)

// box is a sandbox that has been created. Its machine is the pod's to know of.
type box struct {
	request pod.MachineRequest
	netns   *os.File // nil if it has none, and when it has ended
	path    string   // the network namespace's
	created time.Time
	start   *start // under way
	// stopped: it is not to have a machine any more. At is for one that never had any.
	stopped   bool
	stoppedAt time.Time
}

// start is a StartSandbox that hasn't been answered.
type start struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// NewService makes the service. config is the file of the machine's configuration, "" for the default one. socket is the
// path it is reached at, "" if it has none.
func NewService(p *pod.Pod, config string, sd shutdown.Service, log *slog.Logger, socket string) *Service {
	return &Service{pod: p, config: config, shutdown: sd, log: log, socket: socket}
}

// RegisterTTRPC implements pkg/shim's TTRPCService.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) error {
	sandboxapi.RegisterTTRPCSandboxService(server, s)
	return nil
}

// CreateSandbox checks all that can be checked before there is a machine.
func (s *Service) CreateSandbox(_ context.Context, r *sandboxapi.CreateSandboxRequest) (*sandboxapi.CreateSandboxResponse, error) {
	if err := s.create(r); err != nil {
		s.log.Error("create the sandbox", "id", r.SandboxID, "error", err)
		return nil, answer.Error(err)
	}
	return &sandboxapi.CreateSandboxResponse{}, nil
}

func (s *Service) create(r *sandboxapi.CreateSandboxRequest) (err error) {
	if err := s.validate(r); err != nil {
		return err
	}
	config, err := podConfig(r.Options)
	if err != nil {
		return err
	}
	if err := refuse(config); err != nil {
		return err
	}
	b := &box{path: r.NetnsPath, created: time.Now()}
	if b.request, err = s.machineRequest(r, config); err != nil {
		return err
	}
	if r.NetnsPath != "" {
		if b.netns, err = openNetNS(r.NetnsPath); err != nil {
			return err
		}
		b.request.NetNS = fmt.Sprintf("/proc/self/fd/%d", b.netns.Fd()) // whatever becomes of the path
	}
	if err := s.pod.Reserve(common(config, b.request.Hostname)); err != nil {
		b.close()
		return err
	}
	s.mu.Lock()
	s.box = b
	s.mu.Unlock()
	return nil
}

// StartSandbox makes the machine, whose pid stands for the pod's processes.
func (s *Service) StartSandbox(ctx context.Context, r *sandboxapi.StartSandboxRequest) (*sandboxapi.StartSandboxResponse, error) {
	began := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	request, err := s.starts(r.SandboxID, cancel)
	if err != nil {
		return nil, answer.Error(err)
	}
	defer s.started()
	pid, err := s.pod.StartMachine(ctx, request)
	if err != nil {
		s.log.Error("start the sandbox", "id", r.SandboxID, "error", err)
		return nil, answer.Error(err)
	}
	s.log.Debug("start the sandbox", "id", r.SandboxID, "pid", pid, "took", time.Since(began))
	m, _ := s.pod.Machine()
	return &sandboxapi.StartSandboxResponse{Pid: uint32(pid), CreatedAt: timestamppb.New(m.Since)}, nil
}

// starts lets the machine be made, unless the sandbox isn't there or has ended.
func (s *Service) starts(id string, cancel context.CancelFunc) (pod.MachineRequest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.box == nil || id != s.pod.Name():
		return pod.MachineRequest{}, unsupported("sandbox %s is not created: create it first", id)
	case s.box.stopped:
		return pod.MachineRequest{}, unsupported("sandbox %s has been stopped: create another one", id)
	case s.box.start != nil:
		return pod.MachineRequest{}, unsupported("sandbox %s is being started already", id)
	}
	s.box.start = &start{cancel: cancel, done: make(chan struct{})}
	return s.box.request, nil
}

// started is the end of a start, whether there is a machine or not.
func (s *Service) started() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.box.start.done)
	s.box.start = nil
}

// Platform tells what containers the sandbox runs.
func (s *Service) Platform(_ context.Context, r *sandboxapi.PlatformRequest) (*sandboxapi.PlatformResponse, error) {
	if err := s.isMine(r.SandboxID); err != nil {
		return nil, answer.Error(err)
	}
	return &sandboxapi.PlatformResponse{Platform: &types.Platform{OS: "linux", Architecture: runtime.GOARCH}}, nil
}

// StopSandbox ends the machine with all that runs in it. It may have ended before.
func (s *Service) StopSandbox(ctx context.Context, r *sandboxapi.StopSandboxRequest) (*sandboxapi.StopSandboxResponse, error) {
	if _, err := s.find(r.SandboxID); err != nil {
		return nil, answer.Error(err)
	}
	if r.TimeoutSecs > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(r.TimeoutSecs)*time.Second)
		defer cancel()
	}
	if err := s.stop(ctx); err != nil {
		return nil, answer.Error(err)
	}
	return &sandboxapi.StopSandboxResponse{}, nil
}

func (s *Service) stop(ctx context.Context) error {
	s.mu.Lock()
	if !s.box.stopped {
		s.box.stopped, s.box.stoppedAt = true, time.Now()
	}
	start := s.box.start
	s.mu.Unlock()
	if start != nil {
		start.cancel()
		select {
		case <-start.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := s.pod.StopMachine(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.box.close()
	return nil
}

// close lets the network namespace go.
func (b *box) close() {
	if b.netns != nil {
		b.netns.Close() // opened for reading
		b.netns = nil
	}
}

// WaitSandbox waits until the machine has ended, by itself or by StopSandbox.
func (s *Service) WaitSandbox(ctx context.Context, r *sandboxapi.WaitSandboxRequest) (*sandboxapi.WaitSandboxResponse, error) {
	b, err := s.find(r.SandboxID)
	if err != nil {
		return nil, answer.Error(err)
	}
	exit := pod.Exit{At: b.stoppedAt}
	if _, made := s.pod.Machine(); made || !b.stopped {
		if exit, err = s.pod.WaitMachine(ctx); err != nil {
			return nil, answer.Error(err)
		}
	}
	return &sandboxapi.WaitSandboxResponse{ExitStatus: exit.Status, ExitedAt: timestamppb.New(exit.At)}, nil
}

// SandboxStatus answers from memory.
func (s *Service) SandboxStatus(_ context.Context, r *sandboxapi.SandboxStatusRequest) (*sandboxapi.SandboxStatusResponse, error) {
	b, err := s.find(r.SandboxID)
	if err != nil {
		return nil, answer.Error(err)
	}
	resp := &sandboxapi.SandboxStatusResponse{SandboxID: r.SandboxID, State: notReady, CreatedAt: timestamppb.New(b.created)}
	m, made := s.pod.Machine()
	switch {
	case made:
		resp.Pid, resp.CreatedAt = uint32(m.PID), timestamppb.New(m.Since)
		if m.Exit == nil {
			resp.State = ready
		} else {
			resp.ExitedAt = timestamppb.New(m.Exit.At)
		}
	case b.stopped:
		resp.ExitedAt = timestamppb.New(b.stoppedAt)
	}
	if r.Verbose {
		resp.Info = map[string]string{"pid": strconv.FormatUint(uint64(resp.Pid), 10), "state": resp.State, "networkSandboxPath": b.path}
	}
	return resp, nil
}

// PingSandbox asks the guest's agent.
func (s *Service) PingSandbox(ctx context.Context, r *sandboxapi.PingRequest) (*sandboxapi.PingResponse, error) {
	_, err := s.find(r.SandboxID)
	if err == nil {
		err = s.pod.PingMachine(ctx)
	}
	if err != nil {
		return nil, answer.Error(err)
	}
	return &sandboxapi.PingResponse{}, nil
}

// SandboxMetrics tells what the containers use together, as the guest counts it.
func (s *Service) SandboxMetrics(ctx context.Context, r *sandboxapi.SandboxMetricsRequest) (*sandboxapi.SandboxMetricsResponse, error) {
	if _, err := s.find(r.SandboxID); err != nil {
		return nil, answer.Error(err)
	}
	b, err := s.pod.MachineStats(ctx)
	if err != nil {
		return nil, answer.Error(err)
	}
	data, err := answer.Metrics(b)
	if err != nil {
		return nil, answer.Error(fmt.Errorf("metrics of sandbox %s: %w", r.SandboxID, err))
	}
	return &sandboxapi.SandboxMetricsResponse{Metrics: &types.Metric{Timestamp: timestamppb.Now(), ID: r.SandboxID, Data: data}}, nil
}

// UpdateSandbox isn't there: the size of a machine is fixed.
func (s *Service) UpdateSandbox(context.Context, *sandboxapi.UpdateSandboxRequest) (*sandboxapi.UpdateSandboxResponse, error) {
	return nil, answer.NotImplemented("changing a sandbox")
}

// ShutdownSandbox ends the sandbox and the shim, also after a creation or a start that failed. What it can't undo is
// left to `shim delete`, which follows.
func (s *Service) ShutdownSandbox(ctx context.Context, r *sandboxapi.ShutdownSandboxRequest) (*sandboxapi.ShutdownSandboxResponse, error) {
	if err := s.isMine(r.SandboxID); err != nil {
		return nil, answer.Error(err)
	}
	if _, err := s.find(r.SandboxID); err != nil {
		if !s.pod.Retire(ctx, r.SandboxID, s.hide) {
			return nil, answer.Error(unsupported("%s is no sandbox, but a pod that has containers: delete them", r.SandboxID))
		}
	} else {
		s.end(ctx)
	}
	context.AfterFunc(ctx, func() { // as soon as the answer is on its way
		awaitHangup(s.socket, hangupLimit)
		s.shutdown.Shutdown()
	})
	return &sandboxapi.ShutdownSandboxResponse{}, nil
}

// end frees all that the sandbox has, with its containers.
func (s *Service) end(ctx context.Context) {
	if err := s.stop(ctx); err != nil {
		s.log.Error("stop the sandbox", "error", err)
	} else if err := s.pod.Clear(ctx); err != nil {
		s.log.Error("delete the sandbox's containers", "error", err)
	}
	s.hide()
}

// hide makes the shim unreachable: containerd removes the bundle as soon as it has the answer.
func (s *Service) hide() {
	if s.socket != "" {
		os.Remove(s.socket) // `shim delete` tries again
	}
}

// isMine tells whether the sandbox is the one that this shim is for, created or not.
func (s *Service) isMine(id string) error {
	if id != s.pod.Name() {
		return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox %s is not this shim's, which is %s", id, s.pod.Name()))
	}
	return nil
}

// find returns the sandbox as it is.
func (s *Service) find(id string) (box, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.box == nil || id != s.pod.Name() {
		return box{}, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox %s is not created", id))
	}
	return *s.box, nil
}
