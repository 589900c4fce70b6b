package ports

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: nonsense:0016 00000000:0000 0A
   3: 0100007F:XYZ 00000000:0000 0A
   4: 0200000A:0050 0300000A:9999 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   5: 0100007F:0051 00000000:0000 0A
`

const table6 = `  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:0BB8 00000000000000000000000000000000:0000 0A
   1: 0000000000000000FFFF00000100007F:0BB9 00000000000000000000000000000000:0000 0A
   2: 00000000000000000000000000000000:0BBA 00000000000000000000000000000000:0000 0A
`

func TestParse(t *testing.T) {
	all, err := parse(nil, strings.NewReader(table))
	if err == nil {
		all, err = parse(all, strings.NewReader(table6))
	}
	var want []netip.AddrPort
	for _, a := range []string{"127.0.0.1:8080", "0.0.0.0:22", "[::1]:3000", "127.0.0.1:3001", "[::]:3002"} {
		want = append(want, netip.MustParseAddrPort(a))
	}
	if err != nil || !slices.Equal(all, want) {
		t.Errorf("%v, %v; want %v", all, err, want)
	}
}

// TestListeners: both ways to see who listens see the same, and none that is connected.
func TestListeners(t *testing.T) {
	d, err := newDiag()
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	var wanted []netip.AddrPort
	for _, at := range []string{"127.0.0.1:0", "127.0.0.2:0", "[::1]:0", "0.0.0.0:0", "[::]:0"} {
		network := "tcp4"
		if strings.HasPrefix(at, "[") {
			network = "tcp6"
		}
		l, err := net.Listen(network, at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		wanted = append(wanted, l.Addr().(*net.TCPAddr).AddrPort())
	}
	c, err := net.Dial("tcp", wanted[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for name, look := range map[string]func() ([]netip.AddrPort, error){"inet_diag": d.listeners, "/proc": listeners} {
		all, err := look()
		if err != nil {
			if name == "inet_diag" && errors.Is(err, unix.ENOENT) {
				t.Skipf("this kernel has no inet_diag: %v", err)
			}
			t.Fatal(err)
		}
		for _, a := range wanted {
			if !slices.Contains(all, a) {
				t.Errorf("%s doesn't have %v: %v", name, a, all)
			}
		}
		if slices.Contains(all, c.LocalAddr().(*net.TCPAddr).AddrPort()) {
			t.Errorf("%s has one that is connected: %v", name, all)
		}
	}
	if a, ok := addressOf("lo"); !ok || a != loopback4 {
		t.Errorf("lo has %v, %v", a, ok)
	}
	if a, ok := addressOf("none0"); ok {
		t.Errorf("no card has %v", a)
	}
}

func BenchmarkScan(b *testing.B) {
	f := &Forwarder{Device: "lo", relays: map[uint16]*relay{}}
	defer f.look()()
	for b.Loop() {
		f.scan(b.Context())
	}
}

func TestWanted(t *testing.T) {
	f := &Forwarder{Except: 49983, address: netip.MustParseAddr("10.0.0.2"), relays: map[uint16]*relay{3000: nil}}
	for list, want := range map[string]string{
		"127.0.0.1:80":                  "127.0.0.1:80",
		"[::1]:80":                      "[::1]:80",
		"[::1]:80 127.0.0.1:80":         "127.0.0.1:80",
		"127.0.0.1:80 [::1]:80":         "127.0.0.1:80",
		"127.0.0.1:80 0.0.0.0:80":       "",
		"127.0.0.1:80 [::]:80":          "",
		"127.0.0.1:80 10.0.0.2:80":      "",
		"127.0.0.1:3000 10.0.0.2:3000":  "127.0.0.1:3000", // the relay's own
		"127.0.0.1:80 10.0.0.3:80":      "127.0.0.1:80",
		"127.0.0.1:49983 127.0.0.53:53": "",
	} {
		var all []netip.AddrPort
		for a := range strings.FieldsSeq(list) {
			all = append(all, netip.MustParseAddrPort(a))
		}
		var got []string
		for _, a := range slices.Collect(maps.Values(f.wanted(all))) {
			got = append(got, a.String())
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", list, got, want)
		}
	}
}

// A relay hands on each direction's end by itself, and follows its target.
func TestRelay(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server := func(answer string) netip.AddrPort {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				b, _ := io.ReadAll(c) // until the client's end
				_, _ = io.WriteString(c, answer+string(b))
				c.Close()
			}
		}()
		return l.Addr().(*net.TCPAddr).AddrPort()
	}
	r, err := newRelay(ctx, netip.MustParseAddrPort("127.0.0.1:0"), server("one:"))
	if err != nil {
		t.Fatal(err)
	}
	ask := func() string {
		c, err := net.Dial("tcp", r.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = io.WriteString(c, "request")
		_ = c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		return string(b)
	}
	if got := ask(); got != "one:request" {
		t.Errorf("%q", got)
	}
	two := server("two:")
	r.target.Store(&two)
	if got := ask(); got != "two:request" {
		t.Errorf("%q", got)
	}
	r.close()
	if c, err := net.Dial("tcp", r.listener.Addr().String()); err == nil {
		c.Close()
		t.Error("a relay that is closed takes connections")
	}
}

// A server whose answer ends before the request does still gets the rest of it.
func TestRelayAnswerEndsFirst(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		got <- string(b)
	}()
	r, err := newRelay(ctx, netip.MustParseAddrPort("127.0.0.1:0"), l.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	c, err := net.Dial("tcp", r.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, "request")
	c.Close()
	if b := <-got; b != "request" {
		t.Errorf("%q", b)
	}
}

// A relay that can't take connections any more makes room for another one.
func TestRelayIsReplaced(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	r, err := newRelay(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	address := r.listener.Addr().String()
	c, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(c)
	none := limit
	none.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	err = unix.Connect(c, &unix.SockaddrInet4{Port: r.listener.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}})
	for deadline := time.Now().Add(30 * time.Second); !r.ended.Load() && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if err := errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)); err != nil {
		t.Fatal(err)
	}
	if !r.ended.Load() {
		t.Fatal("it goes on without descriptors")
	}
	// The address is free for the next one.
	next, err := newRelay(t.Context(), netip.MustParseAddrPort(address), netip.MustParseAddrPort("127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	next.close()
}

// A program that stops listening at loopback finds its port free for all addresses at once.
func TestFreed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: it takes root to hear of sockets' ends")
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended, err := closed(ctx)
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Log("no such address here: ", err)
			continue
		}
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		l.Close()
		for timeout := time.After(30 * time.Second); ; {
			select {
			case got := <-ended:
				if got != port {
					continue
				}
			case <-timeout:
				t.Errorf("nothing is told of port %d", port)
			}
			break
		}
	}
}
