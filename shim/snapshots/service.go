// Package snapshots is the shim's own ttrpc service for what containerd can't ask for: saving its pod, putting it back to what
// was saved, and holding it.
package snapshots

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	"github.com/cubesandbox/cube/shim/api"
	"github.com/cubesandbox/cube/shim/internal/answer"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Service answers for one pod.
type Service struct {
	pod *pod.Pod
	log *slog.Logger
}

var _ api.SnapshotsService = (*Service)(nil)

// NewService makes the service.
func NewService(p *pod.Pod, log *slog.Logger) *Service { return &Service{pod: p, log: log} }

// RegisterTTRPC implements pkg/shim's TTRPCService.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) error {
	api.RegisterSnapshotsService(server, s)
	return nil
}

// Save implements the API.
func (s *Service) Save(ctx context.Context, r *api.SaveRequest) (*api.SaveResponse, error) {
	began := time.Now()
	purpose := saved.Purpose(r.Purpose)
	if !purpose.Valid() {
		return nil, answer.Error(errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("no snapshot is for %q", r.Purpose)))
	}
	if r.DisksOnly && purpose != "" {
		return nil, answer.Error(errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("no snapshot of disks alone is for %q", r.Purpose)))
	}
	info, err := s.save(ctx, r, purpose)
	if err != nil {
		s.log.Error("save", "snapshot", r.Snapshot, "error", err)
		return nil, answer.Error(err)
	}
	s.log.Debug("save", "snapshot", info.ID, "took", time.Since(began))
	return &api.SaveResponse{Snapshot: info.ID, Frozen: info.Frozen}, nil
}

func (s *Service) save(ctx context.Context, r *api.SaveRequest, purpose saved.Purpose) (*snapshot.Info, error) {
	if r.DisksOnly {
		return s.pod.SaveDisks(ctx, r.Snapshot, r.Like)
	}
	return s.pod.Save(ctx, r.Snapshot, purpose)
}

// Pause implements the API.
func (s *Service) Pause(ctx context.Context, r *api.PauseRequest) (*api.PauseResponse, error) {
	began := time.Now()
	if err := s.pod.PauseToDisk(ctx, r.Container, r.Cold); err != nil {
		s.log.Error("pause to disk", "id", r.Container, "error", err)
		return nil, answer.Error(err)
	}
	s.log.Debug("pause to disk", "id", r.Container, "took", time.Since(began))
	return &api.PauseResponse{}, nil
}

// Stats implements the API.
func (s *Service) Stats(context.Context, *api.StatsRequest) (*api.StatsResponse, error) {
	st, err := s.pod.Usage()
	if err != nil {
		return nil, answer.Error(err)
	}
	return &api.StatsResponse{
		Pid: uint32(st.PID), Snapshot: st.Snapshot, Cold: st.Cold, PrivateBytes: st.Private, PssBytes: st.PSS, DiskBytes: st.Disk,
	}, nil
}

// Rollback implements the API.
func (s *Service) Rollback(ctx context.Context, r *api.RollbackRequest) (*api.RollbackResponse, error) {
	began := time.Now()
	pid, err := s.pod.Rollback(ctx, r.Snapshot)
	if err != nil {
		s.log.Error("roll back", "snapshot", r.Snapshot, "error", err)
		return nil, answer.Error(err)
	}
	s.log.Debug("roll back", "snapshot", r.Snapshot, "pid", pid, "took", time.Since(began))
	return &api.RollbackResponse{Pid: uint32(pid)}, nil
}

// Hold implements the API.
func (s *Service) Hold(ctx context.Context, _ *api.HoldRequest) (*api.HoldResponse, error) {
	began := time.Now()
	if err := s.pod.Hold(ctx); err != nil {
		s.log.Error("hold", "error", err)
		return nil, answer.Error(err)
	}
	s.log.Debug("hold", "took", time.Since(began))
	return &api.HoldResponse{}, nil
}

// Release implements the API.
func (s *Service) Release(ctx context.Context, _ *api.ReleaseRequest) (*api.ReleaseResponse, error) {
	began := time.Now()
	if err := s.pod.Release(ctx); err != nil {
		s.log.Error("release", "error", err)
		return nil, answer.Error(err)
	}
	s.log.Debug("release", "took", time.Since(began))
	return &api.ReleaseResponse{}, nil
}
