package lifecycle

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// host is machines and what answers in them, as far as the engine sees. Each call takes a moment, and can be made to fail, to
// hang, or to be where the engine's process dies.
type host struct {
	mu        sync.Mutex
	machines  map[string]*machine
	snapshots map[string]bool
	network   map[string]Egress
	watchers  map[int]func(string)
	next      int
	took      time.Duration
	calls     []string
	busy      map[string]string // what is being done to each machine
	swept     int
	overlap   []string // calls that came amid another
	// fail is asked before and after each call; what it returns is the call's error. A call that fails after has been done.
	fail func(ctx context.Context, call, id string, after bool) error
}

type machine struct {
	state    Presence
	half     bool
	held     bool
	addr     netip.Addr
	memory   bool // kept by the pause
	lives    int
	told     []Init
	hooked   []HookBody
	started  []string
	rolledTo string
	image    string // that it began with
}

func newHost() *host {
	return &host{machines: map[string]*machine{}, snapshots: map[string]bool{"base": true}, network: map[string]Egress{}, watchers: map[int]func(string){}, took: 100 * time.Millisecond, busy: map[string]string{}}
}

// luck sets what is asked before and after each call from now on.
func (h *host) luck(fail func(ctx context.Context, call, id string, after bool) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail = fail
}

// slow sets how long each call takes.
func (h *host) slow(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.took = d
}

var errFake = errdefs.ErrUnavailable.WithMessage("the machine has no luck")

// do has a call take its time. done is what it does to the host, and undo what that leaves when the context ends.
func (h *host) do(ctx context.Context, call, id string, done func() error) error {
	h.mu.Lock()
	h.calls = append(h.calls, call+" "+id)
	if other, ok := h.busy[id]; ok && call != "look" && call != "network" && id != "" {
		h.overlap = append(h.overlap, fmt.Sprintf("%s amid %s of %s", call, other, id))
	}
	changes := call != "look"
	if changes {
		h.busy[id] = call
	}
	fail, took := h.fail, h.took
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if changes {
			delete(h.busy, id)
		}
	}()
	if fail != nil {
		if err := fail(ctx, call, id, false); err != nil {
			return err
		}
	}
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	h.mu.Lock()
	err := done()
	h.mu.Unlock()
	if err == nil && fail != nil {
		err = fail(ctx, call, id, true)
	}
	return err
}

func (h *host) get(id string, state Presence) (*machine, error) {
	m := h.machines[id]
	if m == nil || m.state != state {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("machine %s isn't in state %v", id, state))
	}
	return m, nil
}

func (h *host) addr() netip.Addr {
	h.next++
	return netip.AddrFrom4([4]byte{10, 200, byte(h.next >> 8), byte(h.next)})
}

func (h *host) Create(ctx context.Context, m Machine) (addr netip.Addr, err error) {
	err = h.do(ctx, "create", m.ID, func() error {
		if !h.snapshots[m.Snapshot] {
			return errdefs.ErrNotFound.WithMessage("no snapshot " + m.Snapshot)
		}
		if h.machines[m.ID] != nil {
			return errdefs.ErrAlreadyExists
		}
		addr = h.addr()
		h.machines[m.ID] = &machine{state: Runs, addr: addr, lives: 1}
		h.network[m.ID] = m.Network
		return nil
	})
	return addr, err
}

func (h *host) Begin(ctx context.Context, b Beginning) (addr netip.Addr, container json.RawMessage, err error) {
	err = h.do(ctx, "begin", b.ID, func() error {
		if h.machines[b.ID] != nil {
			return errdefs.ErrAlreadyExists
		}
		addr = h.addr()
		h.machines[b.ID] = &machine{state: Runs, addr: addr, lives: 1, image: b.Image}
		h.network[b.ID] = b.Network
		return nil
	})
	return addr, json.RawMessage(`{"of":"` + b.Image + `"}`), err
}

func (h *host) Pause(ctx context.Context, id string, memory bool) error {
	return h.do(ctx, "pause", id, func() error {
		m, err := h.get(id, Runs)
		if err == nil {
			m.state, m.memory, m.addr = Still, memory, netip.Addr{}
		}
		return err
	})
}

func (h *host) Resume(ctx context.Context, id string, memory bool) (addr netip.Addr, note string, err error) {
	err = h.do(ctx, "resume", id, func() error {
		m, err := h.get(id, Still)
		if err == nil {
			addr = h.addr()
			m.state, m.addr, m.memory = Runs, addr, memory && m.memory
			m.lives++
		}
		return err
	})
	return addr, "", err
}

func (h *host) Save(ctx context.Context, id, snapshot string) error {
	return h.do(ctx, "save", id, func() error {
		_, err := h.get(id, Runs)
		if err == nil {
			h.snapshots[snapshot] = true
		}
		return err
	})
}

func (h *host) Hold(ctx context.Context, id string) error {
	return h.do(ctx, "hold", id, func() error {
		m, err := h.get(id, Runs)
		if err == nil {
			m.held = true
		}
		return err
	})
}

func (h *host) Release(ctx context.Context, id string) error {
	return h.do(ctx, "release", id, func() error {
		m, err := h.get(id, Runs)
		if err == nil && m.half {
			err = errdefs.ErrNotFound.WithMessage("its machine has ended")
		}
		if err == nil {
			m.held = false
		}
		return err
	})
}

func (h *host) Rollback(ctx context.Context, id, snapshot string) error {
	return h.do(ctx, "rollback", id, func() error {
		m, err := h.get(id, Runs)
		if err == nil {
			m.lives, m.rolledTo = m.lives+1, snapshot
		}
		return err
	})
}

func (h *host) Forget(ctx context.Context, snapshot string) error {
	return h.do(ctx, "forget", snapshot, func() error { delete(h.snapshots, snapshot); return nil })
}

func (h *host) Sweep(context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.swept++
	return nil
}

func (h *host) SetNetwork(ctx context.Context, id string, n Egress) error {
	return h.do(ctx, "network", id, func() error {
		_, err := h.get(id, Runs)
		if err == nil {
			h.network[id] = n
		}
		return err
	})
}

func (h *host) Kill(ctx context.Context, id string) error {
	return h.do(ctx, "kill", id, func() error { delete(h.machines, id); delete(h.network, id); return nil })
}

func (h *host) Look(ctx context.Context, id string) (s Seen, err error) {
	err = h.do(ctx, "look", id, func() error { s = h.seen(h.machines[id]); return nil })
	return s, err
}

func (h *host) seen(m *machine) Seen {
	if m == nil || m.half {
		return Seen{}
	}
	return Seen{State: m.state, Addr: m.addr}
}

func (h *host) All(ctx context.Context) (all map[string]Seen, err error) {
	err = h.do(ctx, "all", "", func() error {
		all = map[string]Seen{}
		for id, m := range h.machines {
			all[id] = h.seen(m)
		}
		return nil
	})
	return all, err
}

func (h *host) Watch(ctx context.Context, ready func(), ended func(string)) error {
	h.mu.Lock()
	n := len(h.watchers)
	h.watchers[n] = ended
	h.mu.Unlock()
	ready()
	<-ctx.Done()
	h.mu.Lock()
	delete(h.watchers, n)
	h.mu.Unlock()
	return ctx.Err()
}

func (h *host) Traffic(context.Context, string) (Traffic, error) {
	return Traffic{TX: Count{4, 1}, RX: Count{5, 2}, Dropped: map[string]uint64{"policy": 3}}, nil
}

func (h *host) Use(context.Context) (map[string]HostUse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[string]HostUse{}
	for id, m := range h.machines {
		if m.state == Runs {
			all[id] = HostUse{CPU: 6 * time.Second, Memory: 7}
		}
	}
	return all, nil
}

func (h *host) Log(context.Context, string, LogQuery) ([]LogEntry, error) { return nil, nil }
func (h *host) FollowLog(ctx context.Context, id string, _ LogStart, ended <-chan struct{}, each func(LogEntry) error) error {
	if err := each(LogEntry{Message: id + " has begun"}); err != nil || ended == nil {
		return err
	}
	select {
	case <-ended:
		return each(LogEntry{Message: id + " has ended"})
	case <-ctx.Done():
		return nil
	}
}

// end has a machine end by itself.
func (h *host) end(id string) {
	h.mu.Lock()
	if m := h.machines[id]; m != nil && m.state == Runs {
		m.half = true
	}
	watchers := maps.Clone(h.watchers)
	h.mu.Unlock()
	for _, ended := range watchers {
		ended(id)
	}
}
