package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
	"github.com/cubesandbox/cube/internal/hostile"
)

// abused is a guest whose agent breaks the rule of that mode, in a container's life; "" breaks none.
func abused(t *testing.T, mode string, scale func(time.Duration) time.Duration) (g *Guest, stdout *mux.Stream) {
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
		_ = f.Close()
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = (&hostile.Agent{Mode: mode}).Serve(t.Context(), ends[1])
		_ = ends[1].Close()
	}()
	ctx := testContext(t)
	if g, err = Connect(ctx, ends[0], scale); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = g.Close()
		<-served
	})
	if _, err := g.Identify(ctx, "host", "id", nil); err != nil {
		t.Fatal(err)
	}
	stdout, number, err := g.Open()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.CreateContainer(ctx, &api.CreateContainerRequest{Id: "c", Stdio: &api.Stdio{Stdout: number}}); err != nil {
		t.Fatal(err)
	}
	if _, err := g.StartContainer(ctx, &api.ContainerRequest{Id: "c"}); err != nil {
		t.Fatal(err)
	}
	return g, stdout
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Calls wait while the guest is at rest, for as long as it takes, and are made when it goes on.
func TestCallsWaitForThaw(t *testing.T) {
	hundredth := func(d time.Duration) time.Duration { return d / 100 }
	g, _ := abused(t, "", hundredth)
	for range 3 {
		if err := g.Freeze(testContext(t)); err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() {
			_, err := g.Stats(testContext(t), &api.ContainerRequest{})
			done <- err
		}()
		if _, err := g.Shutdown(testContext(t), &emptypb.Empty{}); !errors.Is(err, context.DeadlineExceeded) { // the channel is held
			t.Errorf("the machine's end at rest: %v", err)
		}
		impatient, cancel := context.WithTimeout(t.Context(), hundredth(limits["Stats"])*3)
		if _, err := g.ListPids(impatient, &api.ContainerRequest{}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a call of one who doesn't wait: %v", err)
		}
		cancel()
		select {
		case err := <-done:
			t.Errorf("at rest, a call returned %v", err)
		default:
		}
		if err := g.Thaw(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Errorf("the call that has waited: %v", err)
		}
	}
	if err := g.Thaw(testContext(t)); err != nil {
		t.Errorf("thaw without a freeze: %v", err)
	}
	if err := g.Freeze(testContext(t)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := g.Stats(testContext(t), &api.ContainerRequest{})
		done <- err
	}()
	g.session.Abort(io.ErrUnexpectedEOF)
	if err := <-done; !errors.Is(err, ErrGone) {
		t.Errorf("the machine's end at rest: %v", err)
	}
}

// Whatever a guest does when it is to come to rest, a save isn't held up beyond a deadline, and either the guest goes on
// or its machine is known to be lost.
func TestHostileRest(t *testing.T) {
	inTime := func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
	gone := func(err error) bool { return errors.Is(err, ErrGone) }
	well := func(err error) bool { return err == nil }
	for _, tc := range []struct {
		mode         string
		freeze, thaw func(error) bool
		why          string // the channel has ended
	}{
		{"", well, well, ""},
		{hostile.Output, well, well, ""}, // it says that it stands still
		{hostile.Silent + "Freeze", inTime, well, ""},
		{hostile.Silent + "Thaw", well, inTime, ""},
		{hostile.Unheld, inTime, well, ""},
		{hostile.Miscount, gone, gone, "HELD with"},
		{hostile.Chatter, nil, gone, "while the channel is held"}, // that is known a little later
	} {
		t.Run(tc.mode, func(t *testing.T) {
			tenth := func(d time.Duration) time.Duration { return d / 10 }
			g, stdout := abused(t, tc.mode, tenth)
			output := make(chan struct{})
			go func() {
				defer close(output)
				_, _ = io.Copy(io.Discard, stdout)
			}()
			for range 2 {
				if err := g.Freeze(testContext(t)); tc.freeze != nil && !tc.freeze(err) {
					t.Errorf("Freeze: %v", err)
				}
				if tc.why != "" {
					<-g.Done()
				}
				if err := g.Thaw(testContext(t)); !tc.thaw(err) {
					t.Errorf("Thaw: %v", err)
				}
			}
			_, err := g.Stats(testContext(t), &api.ContainerRequest{})
			if tc.why == "" && err != nil {
				t.Errorf("a call afterwards: %v", err)
			}
			if tc.why != "" && (!errors.Is(err, ErrGone) || !strings.Contains(g.Err().Error(), tc.why)) {
				t.Errorf("a call afterwards: %v; the channel: %v", err, g.Err())
			}
			_ = g.Close()
			<-output
		})
	}
}

// The machine of an agent that knows nothing of this can't be saved, and isn't disturbed.
func TestFreezeOfAnOldAgent(t *testing.T) {
	host, guest := net.Pipe()
	go func() {
		// A HELLO has 8 bytes of header and 26 of payload behind its zeros (package mux); version 1 is in the answer.
		const zeros, size = 32<<10 + 8, 34
		b := make([]byte, zeros+size)
		if _, err := io.ReadFull(guest, b); err == nil {
			b = b[zeros:]
			b[0], b[16], b[17] = 2, 0, 1
			_, _ = guest.Write(b)
		}
		_, _ = io.Copy(io.Discard, guest)
	}()
	g, err := Connect(testContext(t), host, same)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Freeze(testContext(t)); !errdefs.IsNotImplemented(err) {
		t.Errorf("got %v", err)
	}
	if err := g.session.Err(); err != nil {
		t.Errorf("the channel has ended: %v", err)
	}
}
