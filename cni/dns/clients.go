package dns

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

// What each sandbox has.
const (
	maxInFlight    = 64  // queries
	maxConnections = 8   // by TCP
	perSecond      = 100 // queries, on the average
	burst          = 200 // queries at once
)

// maxAll is how many queries of all sandboxes are in flight.
const maxAll = 4096

// forgetAbove is how many clients are remembered before idle ones are looked for.
const forgetAbove = 1024

// client is what a sandbox has taken of its limits.
type client struct {
	inFlight, connections int
	tokens                float64 // at the time
	at                    time.Time
}

// clients counts all of them.
type clients struct {
	mu  sync.Mutex
	of  map[netip.Addr]*client
	all int
}

func newClients() *clients { return &clients{of: map[netip.Addr]*client{}} }

// query takes one query of a client's limits. done gives back what it occupies.
func (c *clients) query(a netip.Addr, at time.Time) (done func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cl := c.get(a, at)
	cl.refill(at)
	if cl.tokens < 1 || cl.inFlight >= maxInFlight || c.all >= maxAll {
		return nil, false
	}
	cl.tokens--
	cl.inFlight++
	c.all++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		cl.inFlight--
		c.all--
	}, true
}

// connect takes one connection.
func (c *clients) connect(a netip.Addr) (release func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cl := c.get(a, time.Now())
	if cl.connections >= maxConnections {
		return nil, false
	}
	cl.connections++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		cl.connections--
	}, true
}

// get returns a client's counts. Those who have taken nothing are forgotten from time to time: they would begin with the same.
func (c *clients) get(a netip.Addr, at time.Time) *client {
	cl := c.of[a]
	if cl != nil {
		return cl
	}
	if len(c.of) >= forgetAbove {
		for b, old := range c.of {
			if old.refill(at); old.inFlight == 0 && old.connections == 0 && old.tokens == burst {
				delete(c.of, b)
			}
		}
	}
	cl = &client{tokens: burst, at: at}
	c.of[a] = cl
	return cl
}

func (c *client) refill(at time.Time) {
	if d := at.Sub(c.at); d > 0 {
		c.tokens = min(burst, c.tokens+d.Seconds()*perSecond)
		c.at = at
	}
}

// connection gives back its place when it is closed.
type connection struct {
	net.Conn
	release func()
	once    sync.Once
}

func (c *connection) Close() error {
	c.once.Do(c.release)
	return c.Conn.Close()
}
