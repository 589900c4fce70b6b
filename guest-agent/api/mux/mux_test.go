package mux

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"
	"golang.org/x/sys/unix"
)

// timeout is far more than any step takes, also with -race on a loaded machine.
const timeout = 30 * time.Second

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	t.Cleanup(cancel)
	return ctx
}

// socketpair is the channel as the host really has it.
func socketpair(t testing.TB) (host, guest net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "channel")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		t.Cleanup(func() { _ = conns[i].Close() })
	}
	return conns[0], conns[1]
}

// serve runs the guest's side and hands out its sessions.
func serve(t testing.TB, guest net.Conn) <-chan *Session {
	sessions := make(chan *Session, 16)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = Serve(guest, func(s *Session) { sessions <- s })
	}()
	t.Cleanup(func() {
		_ = guest.Close()
		<-ended
	})
	return sessions
}

// pair connects two sessions.
func pair(t testing.TB) (host, guest *Session) {
	t.Helper()
	h, g := socketpair(t)
	sessions := serve(t, g)
	s, err := Connect(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, next(t, sessions)
}

func next[T any](t testing.TB, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(timeout):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

// open opens a stream on the host and takes it in the guest.
func open(t testing.TB, host, guest *Session, id uint32) (h, g *Stream) {
	t.Helper()
	h, err := host.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	ping(t, host, guest)
	if g, err = guest.Take(id); err != nil {
		t.Fatal(err)
	}
	return h, g
}

// ping returns when all that the host has sent before has been handled by the guest.
func ping(t testing.TB, host, guest *Session) {
	t.Helper()
	if _, err := host.Control().Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(guest.Control(), make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

func TestStreamIsNetConn(t *testing.T) {
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		host, guest := pair(t)
		h, g := open(t, host, guest, 2)
		return h, g, func() { _, _ = h.Close(), g.Close() }, nil
	})
}

func TestHalfCloseComesAfterTheData(t *testing.T) {
	host, guest := pair(t)
	h, g := open(t, host, guest, 2)
	go func() {
		b, _ := io.ReadAll(g)
		_, _ = g.Write(bytes.ToUpper(b))
		_ = g.CloseWrite()
	}()
	want := strings.Repeat("abc", 500_000)
	var got []byte
	var wg sync.WaitGroup
	wg.Go(func() { got, _ = io.ReadAll(h) })
	if _, err := io.WriteString(h, want); err != nil {
		t.Fatal(err)
	}
	_ = h.CloseWrite()
	if _, err := h.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after CloseWrite: %v", err)
	}
	wg.Wait()
	if string(got) != strings.ToUpper(want) {
		t.Fatalf("got %d bytes, want %d", len(got), len(want))
	}
}

func TestBlockedReaderStallsNobody(t *testing.T) {
	host, guest := pair(t)
	_, blocked := open(t, host, guest, 2)
	h, g := open(t, host, guest, 3)
	stalled := make(chan int)
	go func() {
		n, _ := blocked.Write(make([]byte, 10*Window)) // nobody reads it
		stalled <- n
	}()
	const size = 64 << 20
	sent, received := sha256.New(), sha256.New()
	go func() {
		b := make([]byte, 100_000)
		src := rand.NewChaCha8([32]byte{1})
		for n := 0; n < size; n += len(b) {
			b = b[:min(len(b), size-n)]
			_, _ = src.Read(b)
			sent.Write(b)
			_, _ = g.Write(b)
		}
		_ = g.CloseWrite()
	}()
	n, err := io.Copy(received, h)
	if n != size || err != nil {
		t.Fatalf("read %d bytes: %v", n, err)
	}
	if !bytes.Equal(sent.Sum(nil), received.Sum(nil)) {
		t.Fatal("data came damaged")
	}
	ping(t, host, guest)
	_ = host.Close()
	if n := next(t, stalled); n < Window || n > Window+maxOut {
		t.Fatalf("the blocked stream took %d bytes", n)
	}
}

// A reader that is slow gets all, and the writer waits for it.
func TestBackPressure(t *testing.T) {
	host, guest := pair(t)
	h, g := open(t, host, guest, 2)
	_ = h.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	n, err := h.Write(make([]byte, 4*Window))
	if !errors.Is(err, os.ErrDeadlineExceeded) || n != Window+maxOut {
		t.Fatalf("wrote %d bytes against a window of %d: %v", n, Window, err)
	}
	_ = h.SetWriteDeadline(time.Time{})
	_ = h.CloseWrite()
	got, err := io.ReadAll(g)
	if len(got) != n || err != nil {
		t.Fatalf("read %d of %d bytes: %v", len(got), n, err)
	}
}

func TestCloseEndsThePeersWritesAndKeepsWhatWasWritten(t *testing.T) {
	host, guest := pair(t)
	h, g := open(t, host, guest, 2)
	if _, err := h.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	_ = h.Close()
	for {
		if _, err := g.Write(make([]byte, 1000)); errors.Is(err, ErrReset) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if b, err := io.ReadAll(g); string(b) != "last words" || err != nil {
		t.Fatalf("read %q, %v", b, err)
	}
	_ = g.Close()
	ping(t, guest, host)
	if n := len(host.streams) + len(guest.streams); n != 2 {
		t.Fatalf("%d streams are left, want the two ends of the control stream", n)
	}
	if _, err := h.Read(nil); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("read after Close: %v", err)
	}
}

func TestManyStreamsComeAndGo(t *testing.T) {
	host, guest := pair(t)
	go func() { // the guest echoes what control names
		for {
			var id [1]byte
			if _, err := io.ReadFull(guest.Control(), id[:]); err != nil {
				return
			}
			st, err := guest.Take(uint32(id[0]) + 2)
			if err != nil {
				panic(err)
			}
			go func() {
				_, _ = io.Copy(st, st)
				_ = st.Close()
			}()
		}
	}()
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			st, err := host.Open(uint32(i) + 2)
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = host.Control().Write([]byte{byte(i)})
			want := bytes.Repeat([]byte{byte(i)}, 3*Window)
			go func() {
				_, _ = st.Write(want)
				_ = st.CloseWrite()
			}()
			if got, err := io.ReadAll(st); !bytes.Equal(got, want) || err != nil {
				t.Errorf("stream %d: %d bytes, %v", i, len(got), err)
			}
			_ = st.Close()
		})
	}
	wg.Wait()
	host.mu.Lock()
	defer host.mu.Unlock()
	if len(host.streams) != 1 {
		t.Fatalf("%d streams are left", len(host.streams))
	}
}

func TestOpenRefuses(t *testing.T) {
	host, guest := pair(t)
	if _, err := guest.Open(2); err == nil {
		t.Error("the guest opened a stream")
	}
	for _, id := range []uint32{0, 1} {
		if _, err := host.Open(id); err == nil {
			t.Errorf("opened stream %d", id)
		}
	}
	for id := uint32(2); id < 2+MaxStreams-1; id++ {
		if _, err := host.Open(id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := host.Open(5000); err == nil {
		t.Error("opened too many streams")
	}
	ping(t, host, guest)
	if _, err := guest.Take(5000); !errors.Is(err, ErrNoStream) {
		t.Errorf("took a stream that isn't: %v", err)
	}
	if _, err := guest.Take(2); err != nil {
		t.Error(err)
	}
	if _, err := guest.Take(2); !errors.Is(err, ErrNoStream) {
		t.Errorf("took a stream twice: %v", err)
	}
}

func TestEndOfTheMachine(t *testing.T) {
	h, g := socketpair(t)
	sessions := serve(t, g)
	host, err := Connect(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	hs, gs := open(t, host, next(t, sessions), 2)
	if _, err := gs.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(hs, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	_ = g.Close()
	b, err := io.ReadAll(hs)
	if string(b) != "words" && string(b) != " words" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("read %q, %v", b, err)
	}
	next(t, host.Done())
	if _, err := hs.Write([]byte("x")); !errors.Is(err, host.Err()) {
		t.Fatalf("write after the end: %v", err)
	}
	if _, err := host.Open(9); !errors.Is(err, host.Err()) {
		t.Fatalf("open after the end: %v", err)
	}
}

func TestCloseSendsWhatWasWritten(t *testing.T) {
	host, guest := pair(t)
	h, g := open(t, host, guest, 2)
	if _, err := g.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	_ = guest.Close()
	b := make([]byte, 6)
	if _, err := io.ReadFull(h, b); string(b) != "answer" || err != nil {
		t.Fatalf("read %q, %v", b, err)
	}
	if _, err := g.Write([]byte("x")); !errors.Is(err, ErrClosed) {
		t.Fatalf("write after Close: %v", err)
	}
}

// lingering is a channel whose end takes its time.
type lingering struct {
	net.Conn
	until chan struct{}
}

func (l lingering) Close() error {
	<-l.until
	return l.Conn.Close()
}

// Whoever meets the end of a session in a stream is told why it is, however long the channel's own end takes.
func TestReasonIsThereWithTheEnd(t *testing.T) {
	h, g := socketpair(t)
	sessions := serve(t, g)
	l := lingering{h, make(chan struct{})}
	host, err := Connect(testContext(t), l)
	if err != nil {
		t.Fatal(err)
	}
	hs, _ := open(t, host, next(t, sessions), 2)
	reason, ended := errors.New("what it says is wrong"), make(chan struct{})
	go func() {
		defer close(ended)
		host.Abort(reason)
	}()
	if _, err := io.ReadAll(hs); !errors.Is(err, reason) || !errors.Is(host.Err(), reason) {
		t.Errorf("the stream says %v, the session %v", err, host.Err())
	}
	close(l.until)
	next(t, ended)
}
