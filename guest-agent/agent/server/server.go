// Package server answers the host's calls: it translates between the protocol and the packages that do the work, and
// knows what may be called when.
package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/agent/container"
	"github.com/cubesandbox/cube/guest-agent/agent/crun"
	"github.com/cubesandbox/cube/guest-agent/agent/disks"
	"github.com/cubesandbox/cube/guest-agent/agent/events"
	"github.com/cubesandbox/cube/guest-agent/agent/identity"
	"github.com/cubesandbox/cube/guest-agent/agent/network"
	"github.com/cubesandbox/cube/guest-agent/agent/rootfs"
	"github.com/cubesandbox/cube/guest-agent/agent/spec"
	"github.com/cubesandbox/cube/guest-agent/agent/stdio"
	"github.com/cubesandbox/cube/guest-agent/agent/tools"
	"github.com/cubesandbox/cube/guest-agent/agent/volumes"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// callTimeout bounds a call whose caller sets no deadline.
const callTimeout = 2 * time.Minute

// Guest is what the server serves. It is the same for all sessions.
type Guest struct {
	Containers *container.Manager
	Card       *network.Card
	Events     *events.Log
	Tools      *tools.Tools
	Version    string
	// PowerOff ends the machine. It is called once everything is written and the answer to Shutdown is on its way.
	PowerOff func()

	rest rest
}

// service serves one session.
type service struct {
	*Guest
	session    *mux.Session
	configured atomic.Bool
	turn       turn
}

// Serve serves a session to its end.
func (g *Guest) Serve(s *mux.Session) {
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(g.intercept))
	if err != nil {
		slog.Error("can't serve the host", "error", err)
		return
	}
	api.RegisterAgentService(server, &service{Guest: g, session: s})
	_ = server.Serve(context.Background(), &controlListener{session: s})
	_ = server.Close()
}

// intercept bounds a call, turns its error into a status, and a panic into an error.
func (g *Guest) intercept(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (_ any, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	defer recoverInto(&err, info.FullMethod)
	answer, err := g.admit(ctx, path.Base(info.FullMethod), method, unmarshal)
	return answer, toStatus(err)
}

// recoverInto makes an error of a panic: a bug in one call must not take the machine with it.
func recoverInto(err *error, method string) {
	if p := recover(); p != nil {
		slog.Error("panic", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = status.Errorf(codes.Internal, "the agent has a bug: panic in %s: %v", method, p)
	}
}

// toStatus gives an error its code, and makes one line of it.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	var failed *crun.Error
	code := codes.Unknown
	switch {
	case errors.Is(err, errdefs.ErrNotFound), errors.Is(err, disks.ErrNotFound), errors.Is(err, stdio.ErrEnded):
		code = codes.NotFound
	case errors.Is(err, errdefs.ErrAlreadyExists):
		code = codes.AlreadyExists
	case errors.Is(err, errdefs.ErrFailedPrecondition):
		code = codes.FailedPrecondition
	case errors.Is(err, errdefs.ErrInvalidArgument), errors.Is(err, spec.ErrInvalid), errors.Is(err, rootfs.ErrInvalid), errors.Is(err, volumes.ErrInvalid), errors.Is(err, network.ErrInvalid), errors.Is(err, identity.ErrInvalid), errors.Is(err, mux.ErrNoStream):
		code = codes.InvalidArgument
	case errors.As(err, &failed) && failed.NoCommand():
		code = codes.InvalidArgument
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	}
	return status.Error(code, strings.ReplaceAll(err.Error(), "\n", "; "))
}

// streams takes a process's streams. On failure none is kept.
func (s *service) streams(names *api.Stdio) (_ stdio.Streams, err error) {
	var st stdio.Streams
	defer func() {
		if err != nil {
			st.Close()
		}
	}()
	take := func(into *stdio.Stream, id uint32) error {
		if id == 0 {
			return nil
		}
		stream, err := s.session.Take(id)
		if err != nil {
			return err
		}
		*into = stream
		return nil
	}
	if err := take(&st.In, names.GetStdin()); err != nil {
		return st, err
	}
	if names.GetTerminal() && names.GetStdout() == names.GetStdin() {
		st.Out = st.In
	} else if err := take(&st.Out, names.GetStdout()); err != nil {
		return st, err
	}
	if names.GetTerminal() && names.GetStderr() != 0 {
		return st, fmt.Errorf("a terminal has no standard error: %w", errdefs.ErrInvalidArgument)
	}
	return st, take(&st.Err, names.GetStderr())
}

// shares takes the streams of a container's shares. On failure none is kept.
func (s *service) shares(requested []*api.Share) (taken []volumes.Share, err error) {
	for _, r := range requested {
		stream, err := s.session.Take(r.GetStream())
		if err != nil {
			volumes.Close(taken)
			return nil, err
		}
		taken = append(taken, volumes.Share{Stream: stream, File: r.GetFile(), ReadOnly: r.GetReadOnly()})
	}
	return taken, nil
}

// controlListener hands ttrpc the session's one connection.
type controlListener struct {
	session *mux.Session
	given   bool // only Accept's goroutine uses it
}

func (l *controlListener) Accept() (net.Conn, error) {
	if !l.given {
		l.given = true
		return control{l.session.Control()}, nil
	}
	<-l.session.Done()
	return nil, net.ErrClosed
}

func (l *controlListener) Close() error   { return nil }
func (l *controlListener) Addr() net.Addr { return l.session.Control().LocalAddr() }

// control is the connection as ttrpc sees it. Of any end but EOF it writes a line on the console, which is slow; but a
// host that begins a new session is what each restored machine meets with first.
type control struct{ net.Conn }

func (c control) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, mux.ErrReplaced) {
		err = io.EOF
	}
	return n, err
}
