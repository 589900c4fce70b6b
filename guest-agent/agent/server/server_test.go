package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/agent/container"
	"github.com/cubesandbox/cube/guest-agent/agent/crun"
	"github.com/cubesandbox/cube/guest-agent/agent/disks"
	"github.com/cubesandbox/cube/guest-agent/agent/events"
	"github.com/cubesandbox/cube/guest-agent/agent/network"
	"github.com/cubesandbox/cube/guest-agent/agent/spec"
	"github.com/cubesandbox/cube/guest-agent/agent/stdio"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

func TestToStatus(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want codes.Code
	}{
		{fmt.Errorf("container x: %w", errdefs.ErrNotFound), codes.NotFound},
		{fmt.Errorf("find: %w (%w)", disks.ErrNotFound, context.DeadlineExceeded), codes.NotFound},
		{fmt.Errorf("x: %w", stdio.ErrEnded), codes.NotFound},
		{fmt.Errorf("x: %w", errdefs.ErrAlreadyExists), codes.AlreadyExists},
		{fmt.Errorf("x: %w", errdefs.ErrFailedPrecondition), codes.FailedPrecondition},
		{fmt.Errorf("x: %w", spec.ErrInvalid), codes.InvalidArgument},
		{fmt.Errorf("x: %w", mux.ErrNoStream), codes.InvalidArgument},
		{fmt.Errorf("x: %w", network.ErrInvalid), codes.InvalidArgument},
		{&crun.Error{Message: "executable file `x` not found in $PATH"}, codes.InvalidArgument},
		{&crun.Error{Message: "mount: no"}, codes.Unknown},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{fmt.Errorf("x: %w", context.Canceled), codes.Canceled},
		{errors.Join(errors.New("a"), os.ErrPermission), codes.Unknown},
		{status.Error(codes.Internal, "x"), codes.Internal},
	} {
		err := toStatus(tc.err)
		if status.Code(err) != tc.want || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: %v, want %v in one line", tc.err, err, tc.want)
		}
	}
	if err := toStatus(nil); err != nil {
		t.Error(err)
	}
}

// A panic is an error of that call, and bounded calls have a deadline.
func TestIntercept(t *testing.T) {
	info := &ttrpc.UnaryServerInfo{FullMethod: "/cube.agent.v1.Agent/X"}
	_, err := (&Guest{}).intercept(t.Context(), nil, info, func(context.Context, func(any) error) (any, error) { panic("oops") })
	if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "oops") {
		t.Errorf("got %v", err)
	}
	answer, err := (&Guest{}).intercept(t.Context(), nil, info, func(ctx context.Context, _ func(any) error) (any, error) {
		if _, ok := ctx.Deadline(); !ok {
			return nil, errors.New("no deadline")
		}
		return 7, nil
	})
	if answer != 7 || err != nil {
		t.Errorf("got %v, %v", answer, err)
	}
}

// serve serves a session in this process and returns a client for it. The manager has no containers and no runtime.
func serve(t *testing.T, log *events.Log) (api.AgentClient, *mux.Session) {
	t.Helper()
	guest := &Guest{Containers: &container.Manager{}, Events: log, Version: "test"}
	h, g := net.Pipe()
	served := make(chan struct{})
	go func() {
		_ = mux.Serve(g, func(s *mux.Session) {
			guest.Serve(s)
			close(served)
		})
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, err := mux.Connect(ctx, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Close()
		_ = g.Close()
		select {
		case <-served:
		case <-time.After(30 * time.Second):
			t.Error("serving doesn't end with the session")
		}
	})
	return api.NewAgentClient(ttrpc.NewClient(s.Control())), s
}

// hosts is the guest's end of a channel at whose other end one host takes the place of another, unseen.
type hosts struct {
	io.Reader
	ends []net.Conn
}

func (h hosts) Write(b []byte) (n int, err error) {
	for _, end := range h.ends {
		if n, err = end.Write(b); err == nil {
			return n, nil
		}
	}
	return n, err
}

// A session that is replaced, as after a restore, ends as if its host had hung up: ttrpc says nothing of that.
func TestReplacedSessionEnds(t *testing.T) {
	h1, g1 := net.Pipe()
	h2, g2 := net.Pipe()
	t.Cleanup(func() { _, _, _, _ = h1.Close(), g1.Close(), h2.Close(), g2.Close() })
	ends := make(chan error, 2)
	go func() {
		_ = mux.Serve(hosts{io.MultiReader(g1, g2), []net.Conn{g1, g2}}, func(s *mux.Session) {
			conn, err := (&controlListener{session: s}).Accept()
			if err == nil {
				_, err = conn.Read(make([]byte, 1))
			}
			ends <- err
		})
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, h := range []net.Conn{h1, h2} {
		s, err := mux.Connect(ctx, h)
		if err != nil {
			t.Fatal(err)
		}
		if h == h1 {
			_ = s.Close()
		}
	}
	select {
	case err := <-ends:
		if err != io.EOF {
			t.Errorf("the replaced session's reader got %v", err)
		}
	case <-ctx.Done():
		t.Fatal("the replaced session doesn't end")
	}
}

func TestCalls(t *testing.T) {
	client, session := serve(t, events.NewLog())
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	id := &api.ContainerRequest{Id: "x"}
	_, err := client.StartContainer(ctx, id)
	if status.Code(err) != codes.NotFound {
		t.Errorf("start: %v", err)
	}
	if _, err := client.DeleteContainer(ctx, id); err != nil {
		t.Errorf("delete of nothing: %v", err)
	}
	if _, err = client.CreateContainer(ctx, &api.CreateContainerRequest{Id: "x"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("create before Configure: %v", err)
	}
	// A call that fails gives the streams that it names up.
	for _, terminal := range []bool{false, true} {
		names := &api.Stdio{Terminal: terminal}
		var streams []*mux.Stream
		for i, into := range []*uint32{&names.Stdin, &names.Stdout, &names.Stderr} {
			if terminal && i == 2 {
				break
			}
			st, err := session.Open(uint32(len(streams)) + 10 + map[bool]uint32{true: 10}[terminal])
			if err != nil {
				t.Fatal(err)
			}
			*into = st.ID()
			streams = append(streams, st)
		}
		if _, err := client.ExecProcess(ctx, &api.ExecProcessRequest{Id: "x", ExecId: "e", Stdio: names}); status.Code(err) != codes.NotFound {
			t.Errorf("exec: %v", err)
		}
		for _, st := range streams {
			_ = st.SetReadDeadline(time.Now().Add(30 * time.Second))
			if n, err := st.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("stream %d: %d, %v", st.ID(), n, err)
			}
		}
	}
	_, err = client.ExecProcess(ctx, &api.ExecProcessRequest{Stdio: &api.Stdio{Stdin: 99}})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("a stream that isn't: %v", err)
	}
}

func TestEvents(t *testing.T) {
	log := events.NewLog()
	client, _ := serve(t, log)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	log.Add(&api.Event{Event: &api.Event_Oom{Oom: &api.OOM{Id: "x"}}})
	stream, err := client.Events(ctx, &api.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	go log.Add(&api.Event{Event: &api.Event_Exit{Exit: &api.Exit{Id: "x", Status: 3}}})
	for want := uint64(1); want <= 2; want++ {
		e, err := stream.Recv()
		if err != nil || e.Sequence != want {
			t.Fatalf("got %v, %v", e, err)
		}
	}
}
