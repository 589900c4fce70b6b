package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
)

// Deadlines, which Config.Timeout scales.
const (
	attemptTimeout = 2 * time.Second  // one name server's answer
	queryTimeout   = 8 * time.Second  // all of them; resolvers of guests wait 5 s and try twice
	idleTimeout    = 10 * time.Second // a connection without a query
)

// maxQueries of one connection.
const maxQueries = 128

// Config is what a server is made with.
type Config struct {
	Listen  netip.AddrPort // at the gateway's address
	Clients netip.Prefix   // whose queries are answered, but for Listen's address
	// Upstreams are the name servers; none: those of ResolvConf.
	Upstreams  []netip.AddrPort
	ResolvConf string
	// Timeout scales a deadline.
	Timeout func(time.Duration) time.Duration
	Log     *slog.Logger
}

// Server is a forwarder that listens.
type Server struct {
	cfg       Config
	upstreams *upstreams
	clients   *clients
	counters  counters
	udp       *dns.Server
	tcp       *dns.Server
	watch     *watch // nil with configured upstreams
}

// New listens, in the network namespace of the calling thread. Queries are answered once Serve runs.
func New(ctx context.Context, cfg Config) (_ *Server, err error) {
	s := &Server{cfg: cfg, upstreams: newUpstreams(cfg), clients: newClients()}
	if len(cfg.Upstreams) > 0 {
		s.upstreams.set(cfg.Upstreams)
	} else if s.watch, err = newWatch(cfg.ResolvConf, s.upstreams.set, cfg.Log); err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	packets, err := lc.ListenPacket(ctx, "udp4", cfg.Listen.String())
	if err != nil {
		return nil, errors.Join(listenError(cfg.Listen, err), s.watch.close())
	}
	connections, err := lc.Listen(ctx, "tcp4", cfg.Listen.String())
	if err != nil {
		return nil, errors.Join(listenError(cfg.Listen, err), packets.Close(), s.watch.close())
	}
	idle := cfg.Timeout(idleTimeout)
	s.udp = &dns.Server{PacketConn: packets, Handler: s, MsgAcceptFunc: accept, UDPSize: maxUDP}
	s.tcp = &dns.Server{
		Listener: &listener{Listener: connections, server: s}, Handler: s, MsgAcceptFunc: accept,
		ReadTimeout: idle, WriteTimeout: idle, IdleTimeout: func() time.Duration { return idle }, MaxTCPQueries: maxQueries,
	}
	return s, nil
}

func listenError(at netip.AddrPort, err error) error {
	return fmt.Errorf("listen for sandboxes' name lookups at %s: %w; network.dns_port takes another port", at, err)
}

// Addr is where the server listens.
func (s *Server) Addr() netip.AddrPort { return s.udp.PacketConn.LocalAddr().(*net.UDPAddr).AddrPort() }

// Serve answers until ctx ends, which is no error, and what is in flight is answered. To be called once.
func (s *Server) Serve(ctx context.Context) error {
	g, serving := errgroup.WithContext(ctx)
	for _, d := range []*dns.Server{s.udp, s.tcp} {
		g.Go(func() error {
			if err := d.ActivateAndServe(); serving.Err() == nil {
				return err
			}
			return nil // stopped, or before it has begun
		})
	}
	if s.watch != nil {
		g.Go(func() error { return s.watch.run(serving) })
	}
	g.Go(func() error {
		<-serving.Done()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout(queryTimeout))
		defer cancel()
		return errors.Join(s.stop(end, s.udp, s.udp.PacketConn), s.stop(end, s.tcp, s.tcp.Listener), s.watch.close())
	})
	if err := g.Wait(); err != nil {
		return fmt.Errorf("answer sandboxes' name lookups: %w", err)
	}
	return nil
}

// stop ends one of the servers, which may not have begun.
func (s *Server) stop(ctx context.Context, d *dns.Server, socket interface{ Close() error }) error {
	if err := d.ShutdownContext(ctx); err == nil {
		return nil
	}
	if err := socket.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// isClient tells sandboxes from all others: the gateway is in the pool too, and what the host itself sends comes from it.
func (s *Server) isClient(a netip.Addr) bool {
	return s.cfg.Clients.Contains(a) && a != s.cfg.Listen.Addr()
}

// listener takes connections of sandboxes only, and so many of each.
type listener struct {
	net.Listener
	server *Server
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := address(c.RemoteAddr())
		if !l.server.isClient(from) {
			l.server.counters.strangers.Add(1)
		} else if release, ok := l.server.clients.connect(from); ok {
			return &connection{Conn: c, release: release}, nil
		} else {
			l.server.counters.limited.Add(1)
		}
		_ = c.Close()
	}
}

func address(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
