package ports

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
)

// idleTimeout is how long a client's datagrams and the answers to them belong together after the last one, as in the kernel's
// own table of connections.
const idleTimeout = 2 * time.Minute

// ends are a client and the address of the host's that it sends to, which is where the answers must come from.
type ends struct {
	client netip.AddrPort
	host   netip.Addr // of a port at all of the host's addresses
}

// relay passes datagrams on by a socket for each client, so that an answer's is known.
type relay struct {
	*mapping
	socket *net.UDPConn
	any    bool // at all of the host's addresses
	idle   time.Duration

	mu      sync.Mutex
	clients map[ends]*association
}

func newRelay(m *mapping, c *net.UDPConn) (*relay, error) {
	r := &relay{mapping: m, socket: c, any: m.lease.HostIP.IsUnspecified(), idle: m.server.cfg.Timeout(idleTimeout), clients: map[ends]*association{}}
	if r.any {
		return r, ipv4.NewPacketConn(c).SetControlMessage(ipv4.FlagDst, true)
	}
	return r, nil
}

// serve passes on what clients send until the mapping is cut.
func (r *relay) serve() {
	b := make([]byte, maxDatagram)
	oob := make([]byte, 128)
	for {
		n, noob, _, client, err := r.socket.ReadMsgUDPAddrPort(b, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			continue // of an answer that didn't arrive: the kernel tells of it once
		}
		e := ends{client: client}
		if r.any {
			var cm ipv4.ControlMessage
			if err := cm.Parse(oob[:noob]); err != nil {
				continue
			}
			e.host, _ = netip.AddrFromSlice(cm.Dst.To4())
		}
		if r.ended() {
			continue
		}
		if a := r.association(e); a != nil {
			a.postpone(r.idle)
			a.send(b[:n])
		}
	}
}

// association returns the client's, a new one if it has none, or nil if it can't have one.
func (r *relay) association(e ends) *association {
	r.mu.Lock()
	a := r.clients[e]
	r.mu.Unlock()
	if a != nil {
		return a
	}
	if !r.enter() {
		r.server.cfg.Log.Debug("a datagram is dropped: there are too many clients", "port", r.lease.Port, "client", e.client)
		return nil
	}
	a, err := newAssociation(r.dial("udp4"))
	if err != nil {
		r.leave()
		r.server.cfg.Log.Debug("a datagram isn't passed on", "port", r.lease.Port, "client", e.client, "error", err)
		return nil
	}
	r.mu.Lock()
	r.clients[e] = a
	r.mu.Unlock()
	r.serving.Go(func() {
		defer r.leave()
		r.answer(e, a)
	})
	return a
}

// answer passes on what the sandbox sends to a client, until neither has sent anything for a while, the sandbox says that
// nobody is there, or the mapping is cut.
func (r *relay) answer(e ends, a *association) {
	defer func() {
		r.mu.Lock()
		delete(r.clients, e)
		r.mu.Unlock()
		_ = a.conn.Close()
	}()
	stop := context.AfterFunc(r.ctx, func() { _ = a.conn.Close() })
	defer stop()
	var oob []byte
	if r.any {
		oob = (&ipv4.ControlMessage{Src: e.host.AsSlice()}).Marshal()
	}
	for {
		a.postpone(r.idle)
		err := a.receive(func(b []byte) error {
			_, _, err := r.socket.WriteMsgUDPAddrPort(b, oob, e.client)
			return err
		})
		if err != nil {
			return
		}
	}
}
