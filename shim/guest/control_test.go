package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// rawAgent is a guest whose agent is the test: it gets the control stream and does with it what it likes.
func rawAgent(t *testing.T, scale func(time.Duration) time.Duration, agent func(net.Conn)) *Guest {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "agent channel")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = mux.Serve(ends[1], func(s *mux.Session) { agent(s.Control()) })
		_ = ends[1].Close()
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	g, err := Connect(ctx, ends[0], scale)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.Close()
		<-served
	})
	return g
}

// next reads a message's header and drops the rest.
func next(t *testing.T, conn net.Conn) (stream uint32) {
	var h [headerSize]byte
	if _, err := io.ReadFull(conn, h[:]); err != nil {
		t.Errorf("read a call: %v", err)
		return 0
	}
	_, _ = io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(h[:])))
	return binary.BigEndian.Uint32(h[4:])
}

func message(stream uint32, kind, flags byte, length uint32, payload ...byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, length)
	b = binary.BigEndian.AppendUint32(b, stream)
	return append(append(b, kind, flags), payload...)
}

// What no correct agent answers ends the channel at once, with the reason.
func TestAnswersThatAreNone(t *testing.T) {
	for name, tc := range map[string]struct {
		answer func(stream uint32) []byte
		want   string
	}{
		"to another call": {func(id uint32) []byte { return message(id+2, typeResponse, 0, 0) }, "isn't waiting"},
		"to call 0":       {func(uint32) []byte { return message(0, typeResponse, 0, 0) }, "answer to call 0"},
		"a request":       {func(id uint32) []byte { return message(id, 1, 0, 0) }, "type 1"},
		"data":            {func(id uint32) []byte { return message(id, typeData, 0, 1, 0) }, "type 3"},
		"no known type":   {func(id uint32) []byte { return message(id, 99, 0xff, 0) }, "type 99"},
		"4 GiB":           {func(id uint32) []byte { return message(id, typeResponse, 0, 0xffffffff) }, "4294967295 bytes"},
		"too long":        {func(id uint32) []byte { return message(id, typeResponse, 0, maxMessage+1) }, "1048577 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			g := rawAgent(t, same, func(conn net.Conn) { conn.Write(tc.answer(next(t, conn))) })
			if _, err := g.Stats(t.Context(), &api.ContainerRequest{}); !errors.Is(err, ErrGone) {
				t.Errorf("the call returned %v", err)
			}
			<-g.Done()
			if err := g.Err(); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the channel ended with %v, want %q", err, tc.want)
			}
		})
	}
}

// The second answer to a call is one too many. A stream of events may bring many.
func TestAnswersInPieces(t *testing.T) {
	event := message(1, typeData, 0, 2, 0x08, 7)
	g := rawAgent(t, same, func(conn net.Conn) {
		next(t, conn)
		for _, b := range append(append([]byte{}, event...), event...) {
			conn.Write([]byte{b}) // fails when the host has gone, which the other side tells
		}
		conn.Write(message(next(t, conn), typeResponse, 0, 0))
		next(t, conn)
		conn.Write(message(3, typeResponse, 0, 0))
	})
	events, err := g.Events(t.Context(), &api.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if e, err := events.Recv(); err != nil || e.Sequence != 7 {
			t.Fatalf("event %v, %v", e, err)
		}
	}
	if _, err := g.Stats(t.Context(), &api.ContainerRequest{}); err != nil {
		t.Errorf("the call returned %v", err)
	}
	if _, err := g.Stats(t.Context(), &api.ContainerRequest{}); !errors.Is(err, ErrGone) {
		t.Errorf("the call that another one's answer came to returned %v", err)
	}
	if err := g.Err(); err == nil || !strings.Contains(err.Error(), "call 3") {
		t.Errorf("the channel ended with %v", err)
	}
}

// An agent that reads nothing holds up no call beyond its deadline, also none that waits for another one's message.
func TestDeafAgent(t *testing.T) {
	done := make(chan struct{})
	defer close(done)
	hundredth := func(d time.Duration) time.Duration { return d / 100 }
	g := rawAgent(t, hundredth, func(net.Conn) { <-done })
	big := make(chan error)
	go func() {
		_, err := g.ExecProcess(t.Context(), &api.ExecProcessRequest{Process: make([]byte, 2<<20)})
		big <- err
	}()
	for {
		if _, err := g.Stats(t.Context(), &api.ContainerRequest{}); !errors.Is(err, context.DeadlineExceeded) {
			if !errors.Is(err, ErrGone) {
				t.Errorf("a call beside it returned %v", err)
			}
			break
		}
	}
	if err := <-big; err == nil {
		t.Error("the call that nobody has read succeeded")
	}
	<-g.Done()
	if err := g.Err(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the channel ended with %v", err)
	}
}

// What is too long for a message is the caller's fault, and no harm.
func TestLongCall(t *testing.T) {
	g := rawAgent(t, same, func(conn net.Conn) { conn.Write(message(next(t, conn), typeResponse, 0, 0)) })
	if _, err := g.ExecProcess(t.Context(), &api.ExecProcessRequest{Process: make([]byte, 5<<20)}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("the call returned %v", err)
	}
	if _, err := g.Stats(t.Context(), &api.ContainerRequest{}); err != nil {
		t.Errorf("the next call returned %v", err)
	}
}

// An agent that answers nothing isn't asked without end.
func TestSilentAgent(t *testing.T) {
	onlyStats := func(d time.Duration) time.Duration {
		if d == limits["Stats"] {
			return time.Millisecond
		}
		return d
	}
	g := rawAgent(t, onlyStats, func(conn net.Conn) { io.Copy(io.Discard, conn) })
	for range 20 * maxUnanswered {
		_, err := g.Stats(t.Context(), &api.ContainerRequest{})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a call returned %v", err)
		}
		if strings.Contains(err.Error(), "isn't made") {
			return
		}
	}
	t.Errorf("%d calls are unanswered", g.control.unanswered())
}

func FuzzAnswers(f *testing.F) {
	f.Add(message(1, typeResponse, 0, 3, 1, 2, 3), uint8(1))
	f.Add(append(message(3, typeData, 0, 0), message(3, typeData, flagRemoteClosed, 1, 9)...), uint8(7))
	f.Add(append(message(1, typeResponse, 0, maxMessage), message(3, typeData, 0, 0)...), uint8(11))
	f.Fuzz(func(t *testing.T, b []byte, piece uint8) {
		check := func(piece int) (read int, broken error) {
			c := &control{awaited: map[uint32]answer{1: {}, 3: {isStream: true}}}
			for len(b) > read && broken == nil {
				n := min(piece, len(b)-read)
				broken = c.received.scan(b[read:read+n], c.answered)
				read += n
			}
			if broken == nil && c.received.left > maxMessage {
				t.Fatalf("%d bytes are let through", c.received.left)
			}
			return read, broken
		}
		_, whole := check(len(b) + 1)
		if _, err := check(int(piece) + 1); (err == nil) != (whole == nil) || err != nil && err.Error() != whole.Error() {
			t.Fatalf("in one piece %v, in pieces of %d %v", whole, int(piece)+1, err)
		}
	})
}
