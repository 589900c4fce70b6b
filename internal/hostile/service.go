package hostile

import (
	"context"
	"path"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// nonsense is as much as a message may hold without being refused for its length alone.
const nonsense = 512 << 10

const sigkill = 9

var empty = &emptypb.Empty{}

// service serves one session.
type service struct {
	*Agent
	wire    *wire
	session *mux.Session
	// armed: a container is, or was, to be created, which is when most modes begin. begun is closed then.
	armed atomic.Bool
	begun chan struct{}
	exits chan *api.Event // that are still to be told

	mu    sync.Mutex
	boxes map[string]*box
}

// maxBoxes is more containers than any test has.
const maxBoxes = 64

// box is what is said to be a container.
type box struct {
	streams []*mux.Stream
	stdout  *mux.Stream
	ended   bool
}

func (s *service) is(mode string) bool { return s.wire.is(mode) }

// intercept breaks the rule if that call is to do so.
func (s *service) intercept(ctx context.Context, u ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, m ttrpc.Method) (any, error) {
	method := path.Base(info.FullMethod)
	if method == "CreateContainer" && !s.armed.Swap(true) {
		close(s.begun)
		s.begin()
	}
	switch {
	case s.is(Silent + method), method == "CreateContainer" && (s.is(Garbage) || s.is(HugeFrame) || s.is(Stray)):
		<-s.session.Done()
		return nil, status.Error(codes.Canceled, "nobody listens")
	case s.is(Die + method):
		s.Die()
	}
	return m(ctx, u)
}

// Configure implements the API.
func (s *service) Configure(_ context.Context, r *api.ConfigureRequest) (*api.ConfigureResponse, error) {
	if s.Mode == "" {
		s.setMode(r.SandboxId)
		switch {
		case s.is(Silent + "Configure"):
			<-s.session.Done()
		case s.is(Die + "Configure"):
			s.Die()
		}
	}
	return &api.ConfigureResponse{AgentVersion: "hostile"}, nil
}

// SetTime implements the API.
func (s *service) SetTime(context.Context, *api.SetTimeRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// CreateContainer implements the API.
func (s *service) CreateContainer(_ context.Context, r *api.CreateContainerRequest) (*api.ProcessResponse, error) {
	if s.is(Text) {
		return nil, status.Error(codes.Unknown, strings.Repeat("\x1b[2J\r\n\x00\u202e", nonsense/9))
	}
	b := &box{}
	for _, id := range []uint32{r.Stdio.GetStdin(), r.Stdio.GetStdout(), r.Stdio.GetStderr()} {
		st, err := s.session.Take(id)
		if err != nil {
			continue // there is none
		}
		b.streams = append(b.streams, st)
		if id == r.Stdio.GetStdout() {
			b.stdout = st
		}
	}
	s.mu.Lock()
	s.boxes[r.Id] = b
	s.mu.Unlock()
	return &api.ProcessResponse{Pid: 1}, nil
}

// StartContainer implements the API.
func (s *service) StartContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	if b := s.box(r.Id); b != nil && b.stdout != nil && s.is(Output) {
		go spew(b.stdout)
	}
	return empty, nil
}

// ExecProcess implements the API.
func (s *service) ExecProcess(context.Context, *api.ExecProcessRequest) (*api.ProcessResponse, error) {
	return nil, status.Error(codes.NotFound, "no such command")
}

// SignalProcess implements the API.
func (s *service) SignalProcess(_ context.Context, r *api.SignalProcessRequest) (*emptypb.Empty, error) {
	if r.Signal == sigkill && !s.is(Undead) {
		s.kill(r.Id)
	}
	return empty, nil
}

// PauseContainer implements the API.
func (s *service) PauseContainer(context.Context, *api.ContainerRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// ResumeContainer implements the API.
func (s *service) ResumeContainer(context.Context, *api.ContainerRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// UpdateContainer implements the API.
func (s *service) UpdateContainer(context.Context, *api.UpdateContainerRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// ResizePty implements the API.
func (s *service) ResizePty(context.Context, *api.ResizePtyRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// ListPids implements the API.
func (s *service) ListPids(context.Context, *api.ContainerRequest) (*api.ListPidsResponse, error) {
	return &api.ListPidsResponse{Pids: []uint32{1}}, nil
}

// Stats implements the API.
func (s *service) Stats(context.Context, *api.ContainerRequest) (*api.StatsResponse, error) {
	if s.is(Metrics) {
		return &api.StatsResponse{Metrics: []byte(strings.Repeat("\xff", nonsense))}, nil
	}
	return &api.StatsResponse{}, nil
}

// DeleteContainer implements the API.
func (s *service) DeleteContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	s.kill(r.Id)
	return empty, nil
}

// Quiesce implements the API.
func (s *service) Quiesce(context.Context, *emptypb.Empty) (*emptypb.Empty, error) {
	return empty, nil
}

// Freeze implements the API. Whatever writes output goes on.
func (s *service) Freeze(context.Context, *api.FreezeRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// Thaw implements the API.
func (s *service) Thaw(context.Context, *api.ThawRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// AttachProcess implements the API.
func (s *service) AttachProcess(context.Context, *api.AttachProcessRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// IdentifyContainer implements the API.
func (s *service) IdentifyContainer(context.Context, *api.IdentifyContainerRequest) (*emptypb.Empty, error) {
	return empty, nil
}

// Shutdown implements the API.
func (s *service) Shutdown(context.Context, *emptypb.Empty) (*emptypb.Empty, error) {
	return empty, nil
}

func (s *service) box(id string) *box {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.boxes[id]
}

// kill ends a container, once.
func (s *service) kill(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.boxes[id]
	if b == nil || b.ended {
		return
	}
	b.ended = true
	for _, st := range b.streams {
		if !s.is(Output) {
			_ = st.Close()
		}
	}
	s.exits <- &api.Event{Event: &api.Event_Exit{Exit: &api.Exit{Id: id, Status: 128 + sigkill}}}
}
