package testhost

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"

	"github.com/miekg/dns"
)

// Ports of the server, by TCP and UDP. At all others nobody listens.
const (
	// DataPort takes lines: "get N" is answered with N bytes, "put N" and N bytes with their digest, "who" with the address
	// that the server sees the client by; any other one comes back.
	DataPort = 7000
	// EchoPort sends datagrams back.
	EchoPort = 7001
)

// Names that the name server knows, and what they are.
var names = map[string]netip.Addr{"server.test.": Server, "narrow.test.": Narrow}

// services are the internet's.
type services struct {
	data  net.Listener
	echo  net.PacketConn
	names []*dns.Server

	mu     sync.Mutex
	open   map[net.Conn]bool // nil: closed
	served sync.WaitGroup
}

// serve starts the services. Data and echoes are at all of the server's addresses.
func serve(internet *Namespace) (_ *services, err error) {
	s := &services{open: map[net.Conn]bool{}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	err = internet.Do(func() (err error) {
		if s.data, err = net.Listen("tcp4", fmt.Sprintf(":%d", DataPort)); err != nil {
			return err
		}
		// Of a datagram that came to one address the answer has to come from there, which takes a socket per address.
		if s.echo, err = net.ListenPacket("udp4", netip.AddrPortFrom(Server, EchoPort).String()); err != nil {
			return err
		}
		at := netip.AddrPortFrom(Resolver, 53).String()
		conn, err := net.ListenPacket("udp4", at)
		if err != nil {
			return err
		}
		s.names = append(s.names, &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(answer)})
		l, err := net.Listen("tcp4", at)
		if err != nil {
			return err
		}
		s.names = append(s.names, &dns.Server{Listener: l, Handler: dns.HandlerFunc(answer)})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("serve on the test's internet: %w", err)
	}
	s.served.Go(s.accept)
	s.served.Go(s.echoes)
	for _, n := range s.names {
		started := make(chan struct{})
		n.NotifyStartedFunc = func() { close(started) }
		s.served.Go(func() { _ = n.ActivateAndServe() })
		<-started // Shutdown is for what has been started
	}
	return s, nil
}

func (s *services) close() {
	s.mu.Lock()
	for c := range s.open {
		_ = c.Close()
	}
	s.open = nil
	s.mu.Unlock()
	if s.data != nil {
		_ = s.data.Close()
	}
	if s.echo != nil {
		_ = s.echo.Close()
	}
	for _, n := range s.names {
		_ = n.Shutdown()
	}
	s.served.Wait()
}

func (s *services) accept() {
	for {
		c, err := s.data.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.open == nil {
			s.mu.Unlock()
			_ = c.Close()
			return
		}
		s.open[c] = true
		s.mu.Unlock()
		s.served.Go(func() {
			converse(c)
			s.mu.Lock()
			delete(s.open, c)
			s.mu.Unlock()
			_ = c.Close()
		})
	}
}

// converse answers a client until it goes.
func converse(c net.Conn) {
	in := bufio.NewReader(c)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		var n int64
		switch verb, rest, _ := strings.Cut(strings.TrimSpace(line), " "); {
		case verb == "get" && scan(rest, &n):
			_, err = io.Copy(c, Data(n))
		case verb == "put" && scan(rest, &n):
			h := sha256.New()
			if _, err = io.CopyN(h, in, n); err == nil {
				_, err = fmt.Fprintf(c, "%x\n", h.Sum(nil))
			}
		case verb == "who":
			_, err = fmt.Fprintln(c, c.RemoteAddr().(*net.TCPAddr).IP)
		default:
			_, err = io.WriteString(c, line)
		}
		if err != nil {
			return
		}
	}
}

func scan(s string, n *int64) bool {
	_, err := fmt.Sscan(s, n)
	return err == nil && *n >= 0
}

// Data is what the server sends for "get N": bytes without a pattern, the same each time.
func Data(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), n) }

// Digest is that of Data.
func Digest(n int64) string {
	h := sha256.New()
	_, _ = io.Copy(h, Data(n)) // neither end fails
	return fmt.Sprintf("%x", h.Sum(nil))
}

func (s *services) echoes() {
	b := make([]byte, 64<<10)
	for {
		n, from, err := s.echo.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			continue // an ICMP error of a client that has gone
		}
		_, _ = s.echo.WriteTo(b[:n], from)
	}
}

// answer knows a few names.
func answer(w dns.ResponseWriter, q *dns.Msg) {
	r := new(dns.Msg)
	r.SetReply(q)
	r.RecursionAvailable = true
	if len(q.Question) == 1 {
		name := strings.ToLower(q.Question[0].Name)
		if a, ok := names[name]; !ok {
			r.Rcode = dns.RcodeNameError
		} else if q.Question[0].Qtype == dns.TypeA {
			r.Answer = append(r.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: a.AsSlice(),
			})
		}
	}
	_ = w.WriteMsg(r)
}
