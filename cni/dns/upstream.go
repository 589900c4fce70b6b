package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// upstreams are the name servers in the order in which they are asked.
type upstreams struct {
	self    netip.AddrPort
	clients netip.Prefix
	attempt time.Duration

	mu   sync.Mutex
	list []netip.AddrPort // replaced as a whole
}

func newUpstreams(cfg Config) *upstreams {
	return &upstreams{self: cfg.Listen, clients: cfg.Clients, attempt: cfg.Timeout(attemptTimeout)}
}

// set replaces the list. Who is in the pool isn't asked: it is this server itself, or a sandbox.
func (u *upstreams) set(list []netip.AddrPort) {
	list = slices.DeleteFunc(slices.Clone(list), func(a netip.AddrPort) bool {
		return a.Addr().Unmap() == u.self.Addr() || u.clients.Contains(a.Addr().Unmap())
	})
	u.mu.Lock()
	defer u.mu.Unlock()
	u.list = list
}

func (u *upstreams) current() []netip.AddrPort {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.list
}

// prefer has who answered be asked first, as long as the list is the same.
func (u *upstreams) prefer(list []netip.AddrPort, i int) {
	if i == 0 {
		return
	}
	next := slices.Concat(list[i:], list[:i])
	u.mu.Lock()
	defer u.mu.Unlock()
	if slices.Equal(u.list, list) {
		u.list = next
	}
}

// errNone is the lack of name servers.
var errNone = errors.New("the host has no name server: set network.dns_upstreams, or one in resolv.conf")

// ask has one after the other answer, until one does. An answer that a name server couldn't find out is as good as none,
// where there is another to be asked.
func (u *upstreams) ask(ctx context.Context, q *dns.Msg) (best *dns.Msg, failovers uint64, err error) {
	list := u.current()
	if len(list) == 0 {
		return nil, 0, errNone
	}
	var errs []error
	for i, to := range list {
		a, err := u.exchange(ctx, q, to)
		if err == nil && a.Rcode != dns.RcodeServerFailure && a.Rcode != dns.RcodeRefused {
			u.prefer(list, i)
			return a, failovers, nil
		}
		failovers++
		if err != nil {
			errs = append(errs, fmt.Errorf("name server %s: %w", to, err))
		} else if best == nil {
			best = a
		}
		if ctx.Err() != nil {
			break
		}
	}
	if best != nil {
		return best, failovers, nil
	}
	return nil, failovers, errors.Join(errs...)
}

// exchange asks by UDP and, for what doesn't fit in there, by TCP.
func (u *upstreams) exchange(ctx context.Context, q *dns.Msg, to netip.AddrPort) (*dns.Msg, error) {
	a, err := u.once(ctx, "udp", q, to)
	if err == nil && a.Truncated {
		a, err = u.once(ctx, "tcp", q, to)
	}
	return a, err
}

// once asks from a port that nobody knows, by which answers of others are kept out together with the identity.
func (u *upstreams) once(ctx context.Context, network string, q *dns.Msg, to netip.AddrPort) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, u.attempt)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, to.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return nil, err
	}
	conn := &dns.Conn{Conn: c, UDPSize: maxUDP}
	if err := conn.WriteMsg(q); err != nil {
		return nil, err
	}
	for {
		a, err := conn.ReadMsg()
		if err != nil && (a == nil || network == "tcp" || isTimeout(err)) {
			return nil, err
		}
		if err == nil && answers(a, q) {
			return a, nil
		} else if network == "tcp" {
			return nil, errors.New("the answer is to another question")
		}
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n)
}

// answers says whether a is the answer to q.
func answers(a, q *dns.Msg) bool {
	return a.Response && a.Id == q.Id && a.Opcode == q.Opcode && len(a.Question) == 1 &&
		strings.EqualFold(a.Question[0].Name, q.Question[0].Name) &&
		a.Question[0].Qtype == q.Question[0].Qtype && a.Question[0].Qclass == q.Question[0].Qclass
}
