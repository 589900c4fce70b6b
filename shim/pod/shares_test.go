package pod

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

func unixPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ends := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// newRelay relays between a helper's end and a guest's.
func newRelay(t *testing.T) (helper *net.UnixConn, guest *mux.Stream, done <-chan struct{}) {
	t.Helper()
	channel, far := unixPair(t)
	taken := make(chan *mux.Stream, 1)
	go mux.Serve(far, func(s *mux.Session) {
		s.Control().Read(make([]byte, 1)) // a message, before which the stream was opened
		st, err := s.Take(mux.ControlID + 1)
		if err != nil {
			t.Error(err)
		}
		taken <- st
		<-s.Done()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	session, err := mux.Connect(ctx, channel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	st, err := session.Open(mux.ControlID + 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := session.Control().Write([]byte{0}); err != nil {
		t.Fatal(err)
	}
	host, helper := unixPair(t)
	ended := make(chan struct{})
	go func() {
		relay(host, st)
		close(ended)
	}()
	return helper, <-taken, ended
}

func within(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s: not in time", what)
	}
}

// TestRelay: both directions at once, and each end's end is told to the other.
func TestRelay(t *testing.T) {
	helper, guest, done := newRelay(t)
	there, back := make([]byte, 4<<20), make([]byte, 4<<20)
	rand.Read(there)
	rand.Read(back)
	send := func(to end, b []byte) {
		if _, err := to.Write(b); err != nil {
			t.Error(err)
		}
		if err := to.CloseWrite(); err != nil {
			t.Error(err)
		}
	}
	go send(guest, there)
	go send(helper, back)
	for _, c := range []struct {
		from io.Reader
		want []byte
	}{{helper, there}, {guest, back}} {
		if b, err := io.ReadAll(c.from); err != nil || !bytes.Equal(b, c.want) {
			t.Errorf("%d bytes of %d, %v", len(b), len(c.want), err)
		}
	}
	within(t, "the end", done)
}

// TestRelayHoldsBack: what isn't read stays with whoever writes it.
func TestRelayHoldsBack(t *testing.T) {
	_, guest, _ := newRelay(t)
	guest.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)) // for the write to be stuck by then
	n, err := guest.Write(make([]byte, 64<<20))
	if err == nil || n > 4<<20 {
		t.Errorf("%d bytes went on their way to a helper that reads nothing, %v", n, err)
	}
}

// TestRelayOfADeadHelper: the guest is told, and nothing waits.
func TestRelayOfADeadHelper(t *testing.T) {
	helper, guest, done := newRelay(t)
	helper.Close()
	if _, err := guest.Read(make([]byte, 1)); err == nil {
		t.Error("read from a dead helper")
	}
	for err := error(nil); err == nil; {
		guest.SetWriteDeadline(time.Now().Add(10 * time.Second))
		_, err = guest.Write(make([]byte, 1<<10))
	}
	within(t, "the end", done)
}
