package accept

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

func listen(t *testing.T, most int) *Listener {
	t.Helper()
	l, err := Listen(t.Context(), "127.0.0.1:0", most)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func dial(t *testing.T, l *Listener) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

func TestRoom(t *testing.T) {
	l := listen(t, 2)
	accepted := make(chan net.Conn)
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				return
			}
			accepted <- c
		}
	}()
	for range 3 {
		dial(t, l)
	}
	first, second := <-accepted, <-accepted
	select {
	case <-accepted:
		t.Fatal("a third one has room")
	case <-time.After(50 * time.Millisecond):
	}
	first.Close()
	first.Close() // has left already
	third := <-accepted
	dial(t, l)
	select {
	case <-accepted:
		t.Fatal("one that was closed twice has left twice")
	case <-time.After(50 * time.Millisecond):
	}
	l.Close()
	if _, more := <-accepted; more {
		t.Error("a closed listener accepts")
	}
	second.Close()
	third.Close()
}

// TestConn: what net/http and io.Copy look for to have the kernel send, and what ends one direction.
func TestConn(t *testing.T) {
	l := listen(t, 1)
	there := dial(t, l)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, ok := c.(io.ReaderFrom); !ok {
		t.Error("files are copied through the program")
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := there.Read(make([]byte, 1)); err != io.EOF {
		t.Error(err)
	}
	if _, err := there.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Error("the other direction has ended, too: ", err)
	}
}
