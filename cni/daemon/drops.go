package daemon

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"time"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/control"
)

// What is remembered: so many of a sandbox's drops, of so many sandboxes that had one.
const (
	maxDrops = 64
	maxOf    = 1024
)

// Drop is a frame that was dropped. What it didn't get to tell is zero.
type Drop struct {
	Time       time.Time  `json:"time"`
	ToGuest    bool       `json:"to_guest"`
	Reason     string     `json:"reason"`
	Rule       uint16     `json:"rule,omitempty"` // of the policy
	Protocol   uint8      `json:"protocol,omitempty"`
	Remote     netip.Addr `json:"remote,omitzero"`
	RemotePort uint16     `json:"remote_port,omitempty"`
	GuestPort  uint16     `json:"guest_port,omitempty"`
	Length     int        `json:"length"`
}

const dropsPath = "/network/drops"

// Drops asks the daemon for the last drops of what is open under a CNI id, the oldest first. It remembers a few, and is told
// of few in a second: counters have all. errdefs.ErrUnavailable if no daemon runs, errdefs.ErrNotFound for what isn't open.
func Drops(ctx context.Context, cfg *config.Config, id string) (last []Drop, err error) {
	return last, control.Ask(ctx, cfg.ControlSocket(), http.MethodGet, dropsPath, url.Values{"id": {id}}, &last)
}

// drops remembers them. The zero value is ready.
type drops struct {
	mu sync.Mutex
	of map[bpf.ID]*history
}

// history is of a sandbox in its time: another one that has the id later has another epoch, which is higher.
type history struct {
	epoch uint32
	ring  [maxDrops]Drop
	count int // of all
}

func (h *history) last() Drop { return h.ring[(h.count-1)%maxDrops] }

func (d *drops) add(e bpf.Event, now time.Time) {
	if e.Sandbox == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.of[e.Sandbox]
	switch {
	case h == nil:
		d.makeRoom()
		fallthrough
	case h.epoch < e.Epoch:
		h = &history{epoch: e.Epoch}
		d.of[e.Sandbox] = h
	case h.epoch > e.Epoch:
		return // of one that is gone
	}
	h.ring[h.count%maxDrops] = Drop{
		Time: now.Add(-e.Age), ToGuest: e.ToGuest, Reason: e.Reason.String(), Rule: e.Rule, Protocol: e.Protocol,
		Remote: e.Remote, RemotePort: e.RemotePort, GuestPort: e.GuestPort, Length: e.Length,
	}
	h.count++
}

// makeRoom forgets the sandbox of which nothing was heard for the longest time, if there are many.
func (d *drops) makeRoom() {
	if d.of == nil {
		d.of = map[bpf.ID]*history{}
	}
	if len(d.of) < maxOf {
		return
	}
	var oldest bpf.ID
	for id, h := range d.of {
		if oldest == 0 || h.last().Time.Before(d.of[oldest].last().Time) {
			oldest = id
		}
	}
	delete(d.of, oldest)
}

// list returns the last ones, the oldest first.
func (d *drops) list(id bpf.ID, epoch uint32) []Drop {
	d.mu.Lock()
	defer d.mu.Unlock()
	last := []Drop{}
	h := d.of[id]
	if h == nil || h.epoch != epoch {
		return last
	}
	for i := max(0, h.count-maxDrops); i < h.count; i++ {
		last = append(last, h.ring[i%maxDrops])
	}
	return last
}

// readDrops remembers what the datapath reports.
func (d *Daemon) readDrops(ctx context.Context) error {
	events, err := d.datapath.Events()
	if err != nil {
		return err
	}
	defer events.Close()
	stop := context.AfterFunc(ctx, func() { _ = events.Close() })
	defer stop()
	for {
		e, err := events.Read()
		if err != nil {
			return err
		}
		d.drops.add(e, time.Now())
		d.log.LogAttrs(ctx, slog.LevelDebug, "dropped", slog.Int("sandbox", int(e.Sandbox)), slog.Bool("to_guest", e.ToGuest), slog.String("reason", e.Reason.String()),
			slog.Int("protocol", int(e.Protocol)), slog.Any("remote", e.Remote), slog.Int("remote_port", int(e.RemotePort)), slog.Int("guest_port", int(e.GuestPort)))
	}
}

func (d *Daemon) serveDrops(w http.ResponseWriter, r *http.Request) {
	id, epoch, err := d.network.Sandbox(r.Context(), r.URL.Query().Get("id"))
	if err != nil {
		control.Answer(w, nil, err)
		return
	}
	control.Answer(w, d.drops.list(id, epoch), nil)
}
