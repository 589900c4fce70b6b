package dns

import (
	"context"
	"net"
	"slices"
	"time"

	"github.com/miekg/dns"
)

// maxUDP is the size of messages by UDP, small enough for all paths: DNS Flag Day 2020.
const maxUDP = 1232

// accept looks at a message's header before the rest is read.
func accept(h dns.Header) dns.MsgAcceptAction {
	const response, opcode = 1 << 15, 0xf << 11
	switch {
	case h.Bits&response != 0:
		return dns.MsgIgnore
	case h.Bits&opcode != 0:
		return dns.MsgRejectNotImplemented
	case h.Qdcount != 1 || h.Ancount != 0 || h.Nscount != 0 || h.Arcount > 2:
		return dns.MsgReject
	}
	return dns.MsgAccept
}

// refused are types of questions that aren't for one name's records: RFC 8482, RFC 5936, RFC 1995, RFC 8945, RFC 2930.
var refused = []uint16{dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB, dns.TypeTSIG, dns.TypeTKEY}

// ServeDNS implements dns.Handler.
func (s *Server) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	from := address(w.RemoteAddr())
	if !s.isClient(from) {
		s.counters.strangers.Add(1)
		return
	}
	done, ok := s.clients.query(from, time.Now())
	if !ok {
		s.counters.limited.Add(1) // no answer: a flood gets nothing for its packets, and resolvers ask again
		return
	}
	defer done()
	s.counters.queries.Add(1)
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout(queryTimeout))
	defer cancel()
	a := s.answer(ctx, q)
	_, stream := w.RemoteAddr().(*net.TCPAddr)
	fit(a, q, stream)
	if err := w.WriteMsg(a); err != nil {
		s.cfg.Log.Debug("a sandbox doesn't take the answer to its name lookup", "client", from, "error", err)
	}
}

// answer is the answer to a query, of any size.
func (s *Server) answer(ctx context.Context, q *dns.Msg) *dns.Msg {
	question := q.Question[0]
	switch {
	case question.Qclass != dns.ClassINET || slices.Contains(refused, question.Qtype):
		s.counters.refused.Add(1)
		return reply(q, dns.RcodeRefused)
	case question.Qtype == dns.TypeAAAA:
		return reply(q, dns.RcodeSuccess)
	}
	s.counters.forwarded.Add(1)
	a, failovers, err := s.upstreams.ask(ctx, forwarded(q))
	s.counters.failovers.Add(failovers)
	if err != nil {
		s.counters.failed.Add(1)
		s.cfg.Log.Debug("a name lookup fails", "name", question.Name, "error", err)
		return reply(q, dns.RcodeServerFailure)
	}
	strip(a)
	r := reply(q, a.Rcode)
	r.AuthenticatedData, r.Answer, r.Ns = a.AuthenticatedData, a.Answer, a.Ns
	for _, extra := range a.Extra {
		if extra.Header().Rrtype != dns.TypeOPT {
			r.Extra = append(r.Extra, extra)
		}
	}
	return r
}

// reply is an answer without records.
func reply(q *dns.Msg, code int) *dns.Msg {
	r := new(dns.Msg).SetRcode(q, code)
	r.RecursionAvailable = true
	return r
}

// forwarded is the question as name servers are asked it: with an identity of its own, and of the query's options only that
// it wants signatures. Others could tell name servers something, or the sandbox something of them.
func forwarded(q *dns.Msg) *dns.Msg {
	f := new(dns.Msg)
	f.Id = dns.Id()
	f.RecursionDesired, f.CheckingDisabled, f.AuthenticatedData = true, q.CheckingDisabled, q.AuthenticatedData
	f.Question = q.Question
	o := q.IsEdns0()
	return f.SetEdns0(maxUDP, o != nil && o.Do())
}

// fit has an answer fit what the query's sender takes; the rest is to be asked for by TCP.
func fit(a, q *dns.Msg, stream bool) {
	size := dns.MinMsgSize
	if o := q.IsEdns0(); o != nil {
		a.SetEdns0(maxUDP, o.Do())
		size = min(max(int(o.UDPSize()), dns.MinMsgSize), maxUDP)
	}
	if stream {
		size = dns.MaxMsgSize
	}
	a.Truncate(size)
}

// strip takes IPv6 addresses out of an answer, and the keys of encrypted client hellos, which would hide whom a sandbox
// talks to. What was signed with them isn't authentic any more.
func strip(a *dns.Msg) {
	changed := false
	for _, section := range []*[]dns.RR{&a.Answer, &a.Ns, &a.Extra} {
		*section = slices.DeleteFunc(*section, func(r dns.RR) bool {
			switch r := r.(type) {
			case *dns.AAAA:
				changed = true
				return true
			case *dns.HTTPS:
				changed = stripService(&r.SVCB) || changed
			case *dns.SVCB:
				changed = stripService(r) || changed
			}
			return false
		})
	}
	if changed {
		a.AuthenticatedData = false
	}
}

func stripService(r *dns.SVCB) bool {
	n := len(r.Value)
	r.Value = slices.DeleteFunc(r.Value, func(v dns.SVCBKeyValue) bool {
		switch v := v.(type) {
		case *dns.SVCBIPv6Hint, *dns.SVCBECHConfig:
			return true
		case *dns.SVCBMandatory: // a list of keys that must be there
			v.Code = slices.DeleteFunc(v.Code, func(k dns.SVCBKey) bool { return k == dns.SVCB_IPV6HINT || k == dns.SVCB_ECHCONFIG })
			return len(v.Code) == 0
		}
		return false
	})
	return len(r.Value) != n
}
