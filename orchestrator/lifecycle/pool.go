package lifecycle

import (
	"context"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// PoolOptions say how many machines are kept ready for sandboxes to come.
type PoolOptions struct {
	// MaxMemory bounds the memory of all of them, in bytes; 0 keeps none.
	MaxMemory int64
	// MaxPerTemplate bounds how many there are of one build.
	MaxPerTemplate int
	// Pressed returns nil when something on the host has waited for memory in so many percent of the last ten seconds: all members
	// are removed then. nil: nobody tells.
	Pressed func(ctx context.Context, percent int) error
}

// poolTeam is whose machines are that are no team's yet. No team can be called so.
const poolTeam = "(pool)"

// halfLife is how long it takes until half of what was asked for is forgotten.
const halfLife = 5 * time.Minute

// memberState is what a member of the pool is doing.
type memberState int

const (
	beingMade memberState = iota
	still                 // it can be claimed
	leaving               // it is being removed
)

// memberStates are their names.
var memberStates = [...]string{beingMade: "making", still: "ready", leaving: "leaving"}

// member is a machine that is to be a sandbox, whose id it has.
type member struct {
	id    string
	build db.Build
	addr  netip.Addr         // once it is ready
	made  time.Time          // then
	line  Line               // to its envd, nil for one of an engine of before; whoever takes or removes it closes it
	stop  context.CancelFunc // has it not be made any more
	gone  chan struct{}      // closed when nothing is left of it

	state memberState // guarded by pool.mu
}

// pool is what is known of the members. A row is written before a member's machine is made, and deleted after that is gone, or
// when it becomes a sandbox's.
type pool struct {
	PoolOptions
	creates *prometheus.CounterVec
	// wake has room for one: there may be something to do.
	wake chan struct{}
	// claims is how many members are becoming sandboxes, which takes milliseconds if nothing is started beside it.
	claims atomic.Int64

	mu      sync.Mutex // not held while anything is waited for
	members map[string]*member
	wanted  map[string]*demand // by build
	calm    time.Time          // until then none is made: it has failed, or there is no room
	failed  int                // how often in a row
}

// demand is how often a build was asked for lately.
type demand struct {
	build db.Build
	level float64 // at that time
	at    time.Time
}

func newPool(o PoolOptions) *pool {
	return &pool{PoolOptions: o, wake: make(chan struct{}, 1), members: map[string]*member{}, wanted: map[string]*demand{},
		creates: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cube_pool_creates_total",
			Help: "Creates that could have been of the pool: hits were, misses found no member, and of those that were lost the member was of no use.",
		}, []string{"result"})}
}

// poke has the pool looked after.
func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// want notes that a build was asked for. p.mu is held.
func (p *pool) want(b db.Build, n float64) {
	now := time.Now()
	d := p.wanted[b.ID]
	if d == nil {
		d = &demand{at: now}
		p.wanted[b.ID] = d
	}
	d.build, d.level, d.at = b, d.level*decay(now.Sub(d.at))+n, now
}

// decay is what time leaves of a demand.
func decay(d time.Duration) float64 { return math.Exp2(-d.Seconds() / halfLife.Seconds()) }

// target is how many members of a build there are to be.
func (p *pool) target(d *demand, now time.Time) int {
	if p.MaxMemory == 0 {
		return 0
	}
	return min(p.MaxPerTemplate, int(math.Round(d.level*decay(now.Sub(d.at)))))
}

// lasts is how long it is until a demand has fewer members.
func (p *pool) lasts(d *demand, now time.Time) time.Duration {
	level := d.level * decay(now.Sub(d.at))
	least := float64(p.target(d, now)) - 0.5
	return time.Duration(math.Log2(level/least)*float64(halfLife)) + time.Millisecond // of rounding
}

// take takes the oldest member of a build out of those that can be claimed; nil if there is none. That it was asked for is noted. Whoever has
// made a sandbox of it, or starts a machine for want of one, pokes the pool when that is done.
func (p *pool) take(b db.Build) *member {
	if p.MaxMemory == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want(b, 1)
	var oldest *member
	for _, m := range p.members {
		if m.build.ID == b.ID && m.state == still && (oldest == nil || m.made.Before(oldest.made)) {
			oldest = m
		}
	}
	if oldest == nil {
		p.creates.WithLabelValues("miss").Inc()
		return nil
	}
	delete(p.members, oldest.id)
	return oldest
}

// tell tells a member on the line to it who it is.
func (m *member) tell(ctx context.Context, i Init) error {
	if m.line == nil {
		return errdefs.ErrNotFound.WithMessage("there is no line to the member")
	}
	return m.line.Init(ctx, i)
}

// hangUp ends that line, if there is one.
func (m *member) hangUp() {
	if m.line != nil {
		_ = m.line.Close() // it ends all the same
	}
}

// put puts back what take has taken.
func (p *pool) put(m *member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members[m.id] = m
}

// find finds a member that is being made, or can be claimed.
func (p *pool) find(id string) *member {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.members[id]; m != nil && m.state != leaving {
		return m
	}
	return nil
}

// ready are the members that can be claimed.
func (p *pool) ready() (all []*member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if m.state == still {
			all = append(all, m)
		}
	}
	return all
}

// memory is what all members have, in bytes.
func (p *pool) memory() (sum int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		sum += bytesOf(m.build)
	}
	return sum
}

// rest has no member be made for a while.
func (p *pool) rest(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if until := time.Now().Add(d); until.After(p.calm) {
		p.calm = until
	}
}

var descMembers = prometheus.NewDesc("cube_pool_members", "Machines that are kept for sandboxes to come, by template and state.", []string{"template", "state"}, nil)

// collect tells what there is.
func (p *pool) collect(to chan<- prometheus.Metric) {
	p.creates.Collect(to)
	type kind struct{ template, state string }
	count := map[kind]int{}
	p.mu.Lock()
	for _, m := range p.members {
		count[kind{m.build.Template, memberStates[m.state]}]++
	}
	p.mu.Unlock()
	for k, n := range count {
		to <- prometheus.MustNewConstMetric(descMembers, prometheus.GaugeValue, float64(n), k.template, k.state)
	}
}
