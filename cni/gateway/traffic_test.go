package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// listen accepts connections to an address in a namespace and says hello, to whom and to which address.
func listen(t *testing.T, ns netns.NsHandle, addr, hello string, options ...int) {
	t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		control := c.Control(func(fd uintptr) {
			for _, o := range options {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_IP, o, 1))
			}
		})
		return errors.Join(err, control)
	}}
	in(t, ns, func() {
		l, err := lc.Listen(t.Context(), "tcp4", addr)
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = fmt.Fprintf(c, "%s %s at %s", hello, c.RemoteAddr().(*net.TCPAddr).IP, c.LocalAddr())
				_ = c.Close()
			}
		}()
	})
}

// listenUDP is listen for packets.
func listenUDP(t *testing.T, ns netns.NsHandle, addr, hello string) {
	t.Helper()
	in(t, ns, func() {
		c, err := net.ListenPacket("udp4", addr)
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			b := make([]byte, 1500)
			for {
				_, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo(fmt.Appendf(nil, "%s %s at %s", hello, from.(*net.UDPAddr).IP, addr), from)
			}
		}()
	})
}

// say connects from a namespace and returns what is said there, "" for nothing within the timeout.
func say(t *testing.T, ns netns.NsHandle, network, addr string, timeout time.Duration) (answer string) {
	t.Helper()
	in(t, ns, func() {
		c, err := net.DialTimeout(network, addr, timeout)
		if err != nil {
			return
		}
		defer c.Close()
		must(t, c.SetDeadline(time.Now().Add(timeout)))
		if network == "udp4" {
			_, _ = c.Write([]byte("hello"))
		}
		b := make([]byte, 1500)
		n, _ := c.Read(b)
		answer = string(b[:n])
	})
	return answer
}

// inside runs f in the host's namespace on a thread of a subtest's own.
func (h *host) inside(t *testing.T, f func()) {
	t.Helper()
	parent := h.t
	h.t = t
	defer func() { h.t = parent }()
	lockIn(t, h.ns)
	f()
}

// echoServer returns a function that connects to it from a namespace and returns one that exchanges a word.
func echoServer(t *testing.T, ns netns.NsHandle, addr string) func(netns.NsHandle) func(string) {
	t.Helper()
	in(t, ns, func() {
		var lc net.ListenConfig
		l, err := lc.Listen(context.Background(), "tcp4", addr)
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					b := make([]byte, 1500)
					for {
						n, err := c.Read(b)
						if err != nil {
							return
						}
						_, _ = c.Write(b[:n])
					}
				}()
			}
		}()
	})
	return func(from netns.NsHandle) (exchange func(string)) {
		t.Helper()
		in(t, from, func() {
			c, err := net.DialTimeout("tcp4", addr, wait)
			must(t, err)
			t.Cleanup(func() { _ = c.Close() })
			exchange = func(word string) {
				t.Helper()
				must(t, c.SetDeadline(time.Now().Add(wait)))
				_, err := c.Write([]byte(word))
				must(t, err)
				b := make([]byte, 1500)
				n, err := c.Read(b)
				must(t, err)
				if string(b[:n]) != word {
					t.Errorf("said %q, heard %q", word, b[:n])
				}
			}
		})
		return exchange
	}
}
