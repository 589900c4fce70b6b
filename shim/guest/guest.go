// Package guest is the agent in a machine as the host sees it: the multiplexed channel, the calls over it with a deadline
// each, and errors that are safe to show. What comes from a guest is never trusted: texts are cut and cleaned, codes are
// limited to those that mean something to containerd.
package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net"
	"path"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

const (
	// entropyBytes seed the guest's random numbers: what the kernel's pool holds.
	entropyBytes = 64
	// maxText is how much of a guest's error is shown.
	maxText = 1024
)

// limits are the calls' deadlines on a host that isn't slow; the rest have defaultLimit.
var limits = map[string]time.Duration{
	"CreateContainer": 60 * time.Second, // mounts disks, which may need their journals replayed
	"DeleteContainer": 10 * time.Second,
	"Shutdown":        10 * time.Second, // syncs
	"Quiesce":         30 * time.Second,
	"ExecProcess":     30 * time.Second,
	"StartContainer":  30 * time.Second,
	"SetTime":         10 * time.Second,
	"Stats":           3 * time.Second, // callers of State and Stats give up soon
}

const defaultLimit = 10 * time.Second

// atRest are the calls that are made while the guest is at rest; all others wait. One of them is the end of a machine that
// may never go on.
var atRest = map[string]bool{"Freeze": true, "Thaw": true, "Shutdown": true}

// ErrGone says that the channel to the agent has ended, with the machine or without.
var ErrGone = errdefs.ErrUnavailable.WithMessage("the virtual machine is gone")

// Guest is the agent of one machine. All methods may be called from many goroutines.
type Guest struct {
	api.AgentClient
	session *mux.Session
	control *control
	rpc     *ttrpc.Client
	stream  atomic.Uint32
	scale   func(time.Duration) time.Duration
	freezes atomic.Uint64 // the number of the last one
}

// Connect greets the agent over its channel, which it takes over.
func Connect(ctx context.Context, conn net.Conn, scale func(time.Duration) time.Duration) (*Guest, error) {
	s, err := mux.Connect(ctx, conn)
	if err != nil {
		return nil, fmt.Errorf("connect to the agent: %w", err)
	}
	g := &Guest{session: s, control: newControl(s, scale), scale: scale}
	g.rpc = ttrpc.NewClient(g.control, ttrpc.WithUnaryClientInterceptor(interceptor(scale, g.control)))
	g.AgentClient = api.NewAgentClient(g.rpc)
	g.stream.Store(mux.ControlID)
	return g, nil
}

// Open opens a stream for a process's stdio and returns its number, which the agent is to be told.
func (g *Guest) Open() (*mux.Stream, uint32, error) {
	id := g.stream.Add(1)
	if id == math.MaxUint32 {
		return nil, 0, errors.New("all stream numbers of the agent channel are used up")
	}
	st, err := g.session.Open(id)
	return st, id, err
}

// Identify gives the guest its time, random numbers and name, and its network, nil for none: the first call after a boot
// or restore.
func (g *Guest) Identify(ctx context.Context, hostname, id string, network *api.Network) (*api.ConfigureResponse, error) {
	seed := make([]byte, entropyBytes)
	rand.Read(seed) // never fails
	r, err := g.Configure(ctx, &api.ConfigureRequest{
		UnixNanos: time.Now().UnixNano(),
		Entropy:   seed,
		Hostname:  hostname,
		SandboxId: id,
		Network:   network,
	})
	if err != nil {
		return nil, fmt.Errorf("give the guest its identity: %w", err)
	}
	return r, nil
}

// SyncTime corrects the guest's clock.
func (g *Guest) SyncTime(ctx context.Context) error {
	_, err := g.SetTime(ctx, &api.SetTimeRequest{UnixNanos: time.Now().UnixNano()})
	return err
}

// Done is closed when the channel has ended.
func (g *Guest) Done() <-chan struct{} { return g.session.Done() }

// Err says why the channel has ended.
func (g *Guest) Err() error {
	err := g.session.Err()
	var broken *mux.ProtocolError
	if !errors.As(err, &broken) {
		return err
	}
	return errdefs.ErrUnavailable.WithMessage("the virtual machine is ended, since its agent doesn't keep to the protocol: " + broken.Reason)
}

// Broken tells whether the channel has ended because of what the agent has sent. Nothing that the guest does or says
// afterwards is of interest.
func (g *Guest) Broken() bool {
	var broken *mux.ProtocolError
	return errors.As(g.session.Err(), &broken)
}

// Close ends the channel.
func (g *Guest) Close() error {
	g.rpc.Close() // always nil
	return g.session.Close()
}

// interceptor gives each call its deadline and makes errors of the channel and of the guest fit for users. It makes no
// calls to an agent that answers none.
func interceptor(scale func(time.Duration) time.Duration, c *control) ttrpc.UnaryClientInterceptor {
	return func(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
		method := path.Base(info.FullMethod)
		limit, ok := limits[method]
		if !ok {
			limit = defaultLimit
		}
		if !atRest[method] {
			if err := c.pause.wait(ctx, c.ended); err != nil {
				return err
			}
		}
		if n := c.unanswered(); n >= maxUnanswered {
			return fmt.Errorf("the agent in the virtual machine hasn't answered %d calls, so %s isn't made: %w", n, method, context.DeadlineExceeded)
		}
		ctx, cancel := context.WithTimeout(ctx, scale(limit))
		defer cancel()
		var oversized *ttrpc.OversizedMessageErr
		err := within(ctx, func() error { return invoke(ctx, req, resp) })
		switch {
		case err == nil && resp.Status != nil && resp.Status.Code != int32(codes.OK):
			return fromGuest(resp.Status)
		case err == nil:
			return nil
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return fmt.Errorf("the agent in the virtual machine didn't answer %s in time: %w", method, context.DeadlineExceeded)
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &oversized):
			return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s: a message of %d bytes is too long for the agent: it may have %d", method, oversized.RejectedLength(), oversized.MaximumLength()))
		}
		// The channel has ended; or the answer can't be read, and then it ends for that.
		c.abort(protocolErrorf("its answer to %s can't be read", method))
		return fmt.Errorf("%s: %w", method, ErrGone)
	}
}

// within is call's error, or that of ctx if it ends first: a call whose message the agent doesn't take waits for longer.
func within(ctx context.Context, call func() error) error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// errUnknownCall says that the agent doesn't know the call. To containerd it must not look like the shim's not knowing it.
type errUnknownCall string

func (e errUnknownCall) Error() string { return string(e) }

// IsUnknownCall tells whether the agent is too old for the call that has failed.
func IsUnknownCall(err error) bool {
	var e errUnknownCall
	return errors.As(err, &e)
}

// fromGuest is an error that the agent answered.
func fromGuest(s *spb.Status) error {
	text := Text(s.Message)
	switch codes.Code(s.Code) {
	case codes.InvalidArgument:
		return errdefs.ErrInvalidArgument.WithMessage(text)
	case codes.NotFound:
		return errdefs.ErrNotFound.WithMessage(text)
	case codes.AlreadyExists:
		return errdefs.ErrAlreadyExists.WithMessage(text)
	case codes.FailedPrecondition:
		return errdefs.ErrFailedPrecondition.WithMessage(text)
	case codes.Unimplemented: // an older agent's answer
		return fmt.Errorf("%w: %w", errUnknownCall(text), errdefs.ErrUnknown)
	case codes.DeadlineExceeded:
		return fmt.Errorf("%s: %w", text, context.DeadlineExceeded)
	}
	return errdefs.ErrUnknown.WithMessage(text)
}

// Text makes a guest's text fit to be shown: one line, printable, not too long.
func Text(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	s = strings.Join(strings.Fields(s), " ")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// Settle waits for the agent of a machine that is booting and brings the guest to rest, so that the machine can be saved
// as a base snapshot. It leaves agent closed.
func Settle(scale func(time.Duration) time.Duration) func(ctx context.Context, agent net.Conn) error {
	return func(ctx context.Context, agent net.Conn) error {
		g, err := Connect(ctx, agent, scale)
		if err != nil {
			return err
		}
		defer g.Close() // always nil
		if _, err := g.Quiesce(ctx, &emptypb.Empty{}); err != nil {
			return fmt.Errorf("bring the guest to rest: %w", err)
		}
		return nil
	}
}
