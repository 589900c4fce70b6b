package dns

import "sync/atomic"

// Stats counts since the server was made.
type Stats struct {
	Queries   uint64 // of sandboxes, that were within their limits
	Forwarded uint64 // of them, asked of name servers
	Refused   uint64 // of them, that are no plain question
	Failed    uint64 // of them, that no name server answered
	Limited   uint64 // queries and connections beyond a sandbox's limits, not answered
	Strangers uint64 // queries and connections of others, not answered
	Failovers uint64 // name servers that didn't answer while another did or was tried
}

type counters struct {
	queries, forwarded, refused, failed, limited, strangers, failovers atomic.Uint64
}

// Stats returns the counts.
func (s *Server) Stats() Stats {
	c := &s.counters
	return Stats{
		Queries: c.queries.Load(), Forwarded: c.forwarded.Load(), Refused: c.refused.Load(), Failed: c.failed.Load(),
		Limited: c.limited.Load(), Strangers: c.strangers.Load(), Failovers: c.failovers.Load(),
	}
}
