package admission

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/cubesandbox/cube/internal/config"
)

// measure is one of a team's limits.
type measure struct {
	key              string // in the configuration
	limit, use, more int64
	say              func(int64) string
	what, remedy     string
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

const stopOne = "kill or pause one"

// measures are those that sandboxes are measured by, with what is to come on top.
func measures(l config.Limits, use, more Use) []measure {
	return []measure{
		{"running", int64(l.Running), int64(use.Running), int64(more.Running), number, "running sandboxes", stopOne},
		{"vcpus", int64(l.VCPUs), int64(use.VCPUs), int64(more.VCPUs), number, "vCPUs in running sandboxes", stopOne},
		{"memory", int64(l.Memory), use.Memory, more.Memory, size, "memory in running sandboxes", stopOne},
		{"disk", int64(l.Disk), use.Disk, more.Disk, size, "disk in running and paused sandboxes", "kill one"},
	}
}

// refuse is the refusal of a measure.
func (m measure) refuse(team string, own map[string]bool) *Refusal {
	return &Refusal{Reason: teamPrefix + m.key, Team: true, message: fmt.Sprintf("team %s may have %s %s (%s), has %s, and this needs %s more: %s",
		team, m.say(m.limit), m.what, keyOf(team, m.key, own), m.say(m.use), m.say(m.more), m.remedy)}
}

// keyOf is where a limit of a team's is in the configuration.
func keyOf(team, key string, own map[string]bool) string {
	if own[key] {
		return "limits.team." + team + "." + key
	}
	return "limits." + key
}

// allows says no with the limit that a team would have more than. What a sandbox has had already may be as much as it is. mu is held.
func (l *Ledger) allows(was, is *Entry, create bool) error {
	if is.Team == "" {
		return nil
	}
	t := l.team(is.Team)
	limits, own := l.limits.Of(is.Team)
	after := t.Use
	if was != nil && was.Team == is.Team {
		after = after.with(was, -1)
	}
	for _, m := range measures(limits, t.Use, after.with(is, 1).minus(t.Use)) {
		if m.limit > 0 && m.more > 0 && m.use+m.more > m.limit {
			return m.refuse(is.Team, own)
		}
	}
	if !create || limits.CreatesPerMinute == 0 {
		return nil
	}
	if wait := t.creates.wait(time.Now(), limits.CreatesPerMinute, limits.CreateBurst); wait > 0 {
		return &Refusal{Reason: teamPrefix + "creates_per_minute", Team: true, After: wait, message: fmt.Sprintf("team %s may create %d sandboxes a minute, %d at once (%s), and has: try again in %v",
			is.Team, limits.CreatesPerMinute, limits.CreateBurst, keyOf(is.Team, "creates_per_minute", own), wait.Round(100*time.Millisecond))}
	}
	return nil
}

// bucket has as many tokens as creates are allowed.
type bucket struct {
	tokens float64
	at     time.Time // when there were so many; zero: it is full
}

// wait fills the bucket up, and tells how long it is until there is a token, 0 if there is one.
func (b *bucket) wait(now time.Time, perMinute, burst int) time.Duration {
	each := time.Minute / time.Duration(perMinute)
	if b.at.IsZero() {
		b.tokens = float64(burst)
	} else {
		b.tokens = min(b.tokens+float64(now.Sub(b.at))/float64(each), float64(burst))
	}
	b.at = now
	if b.tokens >= 1 {
		return 0
	}
	return time.Duration((1 - b.tokens) * float64(each))
}

// take takes one that there is.
func (b *bucket) take() { b.tokens-- }

// BeginSnapshot lets a team make one snapshot more, and counts it until done, which can be called more than once. there tells how many
// there are, with those of which done wasn't called yet or without.
func (l *Ledger) BeginSnapshot(team string, there func() (int, error)) (done func(), err error) {
	limits, own := l.limits.Of(team)
	if limits.Snapshots == 0 {
		return func() {}, nil
	}
	l.mu.Lock()
	t := l.team(team)
	t.snapshots++
	making := t.snapshots
	l.mu.Unlock()
	done = sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		t.snapshots--
	})
	n, err := there() // after that: what is done meanwhile is there, or was counted
	if err == nil && n+making > limits.Snapshots {
		err = measure{"snapshots", int64(limits.Snapshots), int64(n + making - 1), 1, number, "snapshots of sandboxes", "delete one"}.refuse(team, own)
	}
	if err != nil {
		done()
		return nil, err
	}
	return done, nil
}
