package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/gaissmai/bart"
)

// Compile returns the rows of a policy under a guard. Every address has one, as there is a row for all. A policy or guard
// with an entry that can't be had is refused whole, with errdefs.ErrInvalidArgument and the entry's name.
func Compile(p Policy, g Guard) ([]Row, error) {
	rules, err := p.parse()
	if err != nil {
		return nil, err
	}
	guard, err := g.parse()
	if err != nil {
		return nil, err
	}
	c := compiler{byDefault: p.Default, guard: guard}
	c.add(rules)
	return c.rows(p)
}

// compiler has the rules and openings by prefix.
type compiler struct {
	byDefault Action
	guard     *guard
	prefixes  bart.Table[*at]
	steps     int // that were taken
}

// maxSteps bounds the work on rules that overlap, each of which is looked at for every prefix within its own: a second or two.
// Without those it takes a fraction of that, however many there are.
const maxSteps = 1 << 26

// A step is to look whether a rule is about a port; to put a rule, or a range of its ports, in its place takes more.
const (
	stepsOfRule  = 16
	stepsOfRange = 4
)

// at is what there is at a prefix.
type at struct {
	rules    []rule
	openings []match
}

func (c *compiler) at(p netip.Prefix) *at {
	a, ok := c.prefixes.Get(p)
	if !ok {
		a = &at{}
		c.prefixes.Insert(p, a)
	}
	return a
}

func (c *compiler) add(rules []rule) {
	c.at(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	for p := range c.guard.denied.All() {
		c.at(p)
	}
	for _, m := range c.guard.openings {
		a := c.at(m.prefix)
		a.openings = append(a.openings, m)
	}
	for _, r := range rules {
		a := c.at(r.prefix)
		a.rules = append(a.rules, r)
	}
}

// rows returns a row for each prefix, but for those that say the same as the next shorter one. All that is said of a prefix
// is said at it or at those it is in.
func (c *compiler) rows(p Policy) ([]Row, error) {
	var rows []Row
	var kept bart.Table[Verdict]
	// Sorted, a prefix comes after those it is in.
	for prefix := range c.prefixes.AllSorted() {
		var here at
		for _, a := range c.prefixes.Supernets(prefix) {
			here.rules = append(here.rules, a.rules...)
			here.openings = append(here.openings, a.openings...)
		}
		c.steps += stepsOfRule * len(here.rules)
		slices.SortFunc(here.rules, func(a, b rule) int {
			return cmp.Or(cmp.Compare(rank(b.action), rank(a.action)), cmp.Compare(a.number, b.number))
		})
		v := c.verdict(here, c.guard.denied.LookupPrefix(prefix))
		if c.steps > maxSteps {
			return nil, fmt.Errorf("%d rules, of which %d are about %s, overlap so much that it takes too long; join those for the same addresses: %w", len(p.Rules), len(here.rules), prefix, errdefs.ErrInvalidArgument)
		}
		if len(v.Ranges) > MaxRanges {
			return nil, tooMany(p, prefix, here, len(v.Ranges))
		}
		if _, above, ok := kept.LookupPrefixLPM(prefix); ok && equal(above, v) {
			continue
		}
		kept.Insert(prefix, v)
		rows = append(rows, Row{Prefix: prefix, Verdict: v})
	}
	return rows, nil
}

func tooMany(p Policy, prefix netip.Prefix, here at, n int) error {
	entry := "the operator's openings"
	if len(here.rules) > 0 {
		most := slices.MaxFunc(here.rules, func(a, b rule) int { return cmp.Compare(len(a.ports), len(b.ports)) })
		entry = fmt.Sprintf("rule %d (%s)", most.number, p.Rules[most.number-1])
	}
	return fmt.Errorf("%s: %d ranges of ports or more have verdicts of their own at %s, and %d is the most; join ranges: %w", entry, n, prefix, MaxRanges, errdefs.ErrInvalidArgument)
}

func equal(a, b Verdict) bool {
	return a.Action == b.Action && a.Rule == b.Rule && slices.Equal(a.Ranges, b.Ranges)
}

// said is what is said of a packet.
type said struct {
	action Action
	rule   uint16
}

// verdict puts together what rules and openings say of the same addresses.
func (c *compiler) verdict(here at, denied bool) Verdict {
	var ranges []Range
	for _, p := range []Protocol{TCP, UDP, ICMP} {
		ranges = append(ranges, c.ranges(here, denied, p)...)
	}
	// The commonest word goes without saying.
	count := map[said]int{}
	most := said{ranges[0].Action, ranges[0].Rule}
	for _, r := range ranges {
		s := said{r.Action, r.Rule}
		count[s]++
		if count[s] > count[most] {
			most = s
		}
	}
	ranges = slices.DeleteFunc(ranges, func(r Range) bool { return said{r.Action, r.Rule} == most })
	return Verdict{Action: most.action, Rule: most.rule, Ranges: ranges}
}

// ranges covers all ports of a protocol with ranges that differ from their neighbours.
func (c *compiler) ranges(here at, denied bool, p Protocol) []Range {
	starts := []int{0}
	cut := func(m match) {
		if p == ICMP || !slices.Contains(m.protocols, p) {
			return
		}
		c.steps += stepsOfRange * len(m.ports)
		for _, r := range m.ports {
			starts = append(starts, int(r.first), int(r.last)+1)
		}
	}
	for _, r := range here.rules {
		cut(r.match)
	}
	if denied {
		for _, m := range here.openings {
			cut(m)
		}
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)

	end := int(allPorts.last)
	if p == ICMP {
		end = 0
	}
	var ranges []Range
	for i, first := range starts {
		if first > end {
			break
		}
		last := end
		if i+1 < len(starts) {
			last = min(end, starts[i+1]-1)
		}
		if c.steps > maxSteps && i > 0 {
			break // it is refused
		}
		s := c.decide(here, denied, p, uint16(first))
		if n := len(ranges); n > 0 && s == (said{ranges[n-1].Action, ranges[n-1].Rule}) {
			ranges[n-1].Last = uint16(last)
			continue
		}
		ranges = append(ranges, Range{Protocol: p, First: uint16(first), Last: uint16(last), Action: s.action, Rule: s.rule})
		// Neighbours differ, so at most every other one goes without saying: these are too many already.
		if len(ranges) > 2*MaxRanges+1 {
			break
		}
	}
	return ranges
}

// decide names the first of the rules that decide. They are sorted by what they say, then by their numbers.
func (c *compiler) decide(here at, denied bool, p Protocol, port uint16) said {
	if denied && !slices.ContainsFunc(here.openings, func(m match) bool { return m.covers(p, port) }) {
		return said{action: HardDeny}
	}
	for _, r := range here.rules {
		c.steps++
		if r.covers(p, port) {
			return said{r.action, r.number}
		}
	}
	return said{action: c.byDefault}
}

// rank orders what rules say: the higher one holds.
func rank(a Action) int {
	switch a {
	case Proxy:
		return 2
	case Direct:
		return 1
	}
	return 0
}
