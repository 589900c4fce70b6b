// Package leftover finds what a stack has left on its host that nobody owns any more, such as a machine whose shim was
// killed while containerd couldn't clean up after it, and removes it.
//
// A thing is this stack's by its configuration alone: it is below its run or state directory, or named after them. It is a
// leftover when its owner is known to be gone: a process that has ended, or a container that containerd doesn't know. What
// is younger than the time that an owner may need to show up is left alone. What only containerd can tell isn't looked for
// while containerd doesn't answer.
//
// Packed root images aren't looked for: they have no name and end with whoever has them open. Nor is the mounted store,
// which the next `cube up` takes over and `cube down` unmounts.
package leftover

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

const (
	// youth is the longest that something may be there before its owner can be seen.
	youth = time.Minute
	// askLimit bounds the questions to containerd, which asks every shim.
	askLimit = 15 * time.Second
)

// Leftover is one thing that is left.
type Leftover struct {
	// Kind and Name say what it is: "machine", and its directory.
	Kind, Name string
	Detail     string    // what is known of it, for people
	Since      time.Time // zero where it isn't known
	Size       int64     // bytes on disk, 0 where that doesn't matter
	// Remedy is what Remove does ("kills its QEMU and removes …"), or what to do about a thing that Stays.
	Remedy string
	// Stays says that Remove doesn't touch it: it is a contradiction that takes people to resolve.
	Stays bool

	remove func(ctx context.Context) error
}

// Report is what was found.
type Report struct {
	Found []Leftover
	// Blind is why containerd couldn't tell what it has; nil when it could.
	Blind error
	// Err is what went wrong with the search otherwise.
	Err error
}

// finder looks for leftovers of one kind.
type finder struct {
	kind string
	asks bool // it needs to know what containerd has
	find func(ctx context.Context, s *search) ([]Leftover, error)
}

// finders are in the order in which things are best removed: owners first.
var finders = []finder{
	{"shim", true, shims},
	{"bundle", true, bundles},
	{"pod", false, pods},
	{"machine", false, machines},
	attachmentFinder,
	{"tap", false, taps},
	{"cgroup", false, groups},
	{"uid", false, uids},
	{"socket", false, sockets},
	{"mount", false, mounts},
	{"loop device", false, loops},
	{"log", true, logs},
	{"snapshot", false, snapshots},
	{"base snapshot", false, baseSnapshots},
	{"artefact", false, artefacts},
	{"task", true, tasks},
}

// search is one look at the host.
type search struct {
	cfg  *config.Config
	ctrd *sandbox.Client
	inv  *sandbox.Inventory
}

// Find lists the leftovers, in an order in which they can be removed. It changes nothing.
func Find(ctx context.Context, cfg *config.Config) Report {
	var r Report
	s, err := look(ctx, cfg)
	r.Blind = err
	defer s.close()
	for _, f := range finders {
		if f.asks && r.Blind != nil {
			continue
		}
		found, err := f.of(ctx, s)
		r.Found = append(r.Found, found...)
		r.Err = errors.Join(r.Err, err)
	}
	return r
}

// Remove removes a leftover. It looks again before: what has an owner meanwhile, or is gone, is left alone.
func Remove(ctx context.Context, cfg *config.Config, l Leftover) error {
	s, err := look(ctx, cfg)
	defer s.close()
	for _, f := range finders {
		if f.kind != l.Kind {
			continue
		}
		if f.asks && err != nil {
			return err
		}
		found, err := f.of(ctx, s)
		for _, again := range found {
			if again.Name == l.Name && again.remove != nil {
				return again.remove(ctx)
			}
		}
		return err
	}
	return nil
}

// RemoveAll removes what can be removed, and what turns up with that, each once. done is told of each removal.
func RemoveAll(ctx context.Context, cfg *config.Config, done func(l Leftover, err error)) {
	type name struct{ kind, name string }
	tried := make(map[name]bool)
	for {
		r := Find(ctx, cfg)
		news := slices.DeleteFunc(slices.Clone(r.Found), func(l Leftover) bool { return l.Stays || tried[name{l.Kind, l.Name}] })
		if len(news) == 0 || ctx.Err() != nil {
			return
		}
		for _, l := range news {
			tried[name{l.Kind, l.Name}] = true
			done(l, Remove(ctx, cfg, l))
		}
	}
}

func (f finder) of(ctx context.Context, s *search) ([]Leftover, error) {
	found, err := f.find(ctx, s)
	for i := range found {
		found[i].Kind, found[i].Stays = f.kind, found[i].remove == nil
	}
	return found, err
}

// look begins a search. The error says why containerd doesn't tell what it has; the rest can be searched for without.
func look(ctx context.Context, cfg *config.Config) (*search, error) {
	s := &search{cfg: cfg}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(askLimit))
	defer cancel()
	var err error
	if s.ctrd, err = sandbox.Connect(ctx, cfg); err != nil {
		return s, err
	}
	s.inv, err = s.ctrd.Inventory(ctx)
	return s, err
}

func (s *search) close() {
	if s.ctrd != nil {
		_ = s.ctrd.Close()
	}
}

// old says whether something has been there long enough for its owner to be seen.
func (s *search) old(since time.Time) bool { return time.Since(since) >= s.cfg.Timeout(youth) }
