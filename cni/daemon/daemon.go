package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/dns"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/ports"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/internal/undo"
)

// reapInterval is how long a flow may be there after it has timed out, at most.
const reapInterval = 15 * time.Second

// resolvConf has the name servers where none are configured.
const resolvConf = "/etc/resolv.conf"

// Daemon is the network's. Up comes first, then Run, then Close; requests may come at any time.
type Daemon struct {
	cfg     *config.Config
	log     *slog.Logger
	network *network.Network

	gateway  *gateway.Gateway
	datapath *bpf.Datapath
	dns      *dns.Server
	ports    *ports.Server
	drops    drops
	blocked  []gateway.Finding // others' rules that stop sandboxes' packets
	summary  string
	open     undo.Stack

	handler atomic.Pointer[http.ServeMux] // nil before Up

	// Each has one where there is something to do.
	refresh     chan struct{} // open places are to follow the host
	rules, rest chan struct{} // the gateway may have been changed: its rules, or the rest of it
}

// New does nothing yet.
func New(cfg *config.Config, log *slog.Logger) *Daemon {
	one := func() chan struct{} { return make(chan struct{}, 1) }
	return &Daemon{cfg: cfg, log: log, network: network.New(cfg), refresh: one(), rules: one(), rest: one()}
}

// Up brings the network up, in the network namespace of the calling thread, or takes over what there is of it: what is
// open goes on. When it fails, what was in force before is as it was, or is the next Up's to put in order.
func (d *Daemon) Up(ctx context.Context) (err error) {
	var u undo.Stack
	defer u.Run(&err)
	defer func() { err = explain(err) }()
	if d.gateway, err = gateway.Up(ctx, d.cfg); err != nil {
		return err
	}
	u.Push(d.gateway.Close)
	if d.datapath, err = d.network.Up(ctx, d.gateway); err != nil {
		return err
	}
	u.Push(d.datapath.Close)
	if d.blocked, err = d.blockers(ctx); err != nil {
		return err
	}
	d.ports = d.mapPorts()
	// The last that can fail: it is closed by Run.
	if d.dns, err = d.listen(ctx); err != nil {
		return err
	}
	d.summary = d.describe(d.gateway.Uplink)
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+dropsPath, d.serveDrops)
	mux.Handle(ports.Path, d.ports)
	d.handler.Store(mux)
	d.open, u = u, undo.Stack{}
	return nil
}

// blockers looks for others' rules that stop sandboxes' packets. They are the host's to change, and the network is up with
// them: who runs a firewall may want it so.
func (d *Daemon) blockers(ctx context.Context) (blocked []gateway.Finding, err error) {
	found, err := gateway.Check(ctx, d.cfg)
	for _, f := range found {
		if f.Level == gateway.Blocked {
			blocked = append(blocked, f)
		}
	}
	return blocked, err
}

// explain adds the way out to what the kernel refuses.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w; the network takes CAP_NET_ADMIN, CAP_BPF and CAP_SYS_ADMIN: run cube up as the host's root: %w", err, errdefs.ErrPermissionDenied)
	case errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w; the network takes a kernel of version 6.1 or later: %w", err, errdefs.ErrNotImplemented)
	}
	return err
}

// listen is for name lookups at the gateway's address.
func (d *Daemon) listen(ctx context.Context) (*dns.Server, error) {
	n := &d.cfg.Network
	var upstreams []netip.AddrPort
	for _, u := range n.DNSUpstreams {
		upstreams = append(upstreams, u.AddrPort)
	}
	return dns.New(ctx, dns.Config{
		Listen:     netip.AddrPortFrom(n.Gateway(), n.DNSPort),
		Clients:    n.Pool,
		Upstreams:  upstreams,
		ResolvConf: resolvConf,
		Timeout:    d.cfg.Timeout,
		Log:        d.log,
	})
}

// mapPorts is for the ports of the host that lead to sandboxes.
func (d *Daemon) mapPorts() *ports.Server {
	return ports.New(ports.Config{
		Lookup:  d.network.PortTarget,
		IDs:     d.network.PortOwners,
		Dir:     d.network.PortsDir(),
		Device:  d.cfg.Network.Device,
		Timeout: d.cfg.Timeout,
		Log:     d.log,
	})
}

// Run keeps the network up until ctx ends, which is no error and changes nothing in force. It ends before only when the
// network can't go on: name lookups aren't answered any more, or somebody has taken it down. All else is logged and tried
// again.
func (d *Daemon) Run(ctx context.Context) error {
	d.warn(d.gateway.Uplink)
	for _, f := range d.blocked {
		d.log.Warn("others' rules stop sandboxes' packets: "+f.Detail, "remedy", f.Remedy)
	}
	g, running := errgroup.WithContext(ctx)
	g.Go(func() error { return d.dns.Serve(running) })
	g.Go(func() error { return d.keepWarm(running) })
	for what, f := range map[string]func(context.Context) error{
		"serve port mappings":         d.ports.Run,
		"forget idle flows":           d.reap,
		"remember drops":              d.readDrops,
		"follow the uplink":           d.followUplink,
		"follow the host's addresses": d.followAddresses,
		"have sandboxes follow them":  d.followHost,
		"watch what others change":    d.watchChanges,
		"put in order what they have": d.mend,
	} {
		g.Go(func() error {
			d.keep(running, what, f)
			return nil
		})
	}
	return g.Wait()
}

func (d *Daemon) reap(ctx context.Context) error {
	d.datapath.RunReaper(ctx, reapInterval, bpf.DefaultTimeouts)
	return nil
}

// keepWarm keeps taps ready as long as there is a network.
func (d *Daemon) keepWarm(ctx context.Context) (down error) {
	d.keep(ctx, "keep taps ready", func(ctx context.Context) error {
		err := d.network.KeepWarm(ctx)
		if errdefs.IsUnavailable(err) || errors.Is(err, fs.ErrNotExist) {
			down = err
			return nil
		}
		return err
	})
	return down
}

// Close lets go of the network, which stays in force. Not during Run.
func (d *Daemon) Close() error { return d.open.Release() }

// Probe says why nothing can be opened. That sandboxes don't reach all that they may, or that no more fit, is the host's
// state and not the daemon's.
func (d *Daemon) Probe(ctx context.Context) error {
	err := d.network.Status(ctx)
	if errdefs.IsFailedPrecondition(err) || errdefs.IsResourceExhausted(err) {
		return nil
	}
	return err
}

// Summary is a line on the network as it was when Up returned, for people.
func (d *Daemon) Summary() string { return d.summary }

func (d *Daemon) describe(up gateway.Uplink) string {
	if len(up.Devices) == 0 {
		return fmt.Sprintf("network %s without internet: the host has no default route", d.cfg.Network.Pool)
	}
	s := fmt.Sprintf("network %s by %s", d.cfg.Network.Pool, strings.Join(up.Devices, " and "))
	if len(d.blocked) > 0 {
		s += ", where others' rules stop sandboxes' packets: `cube doctor` tells which"
	}
	return s
}

// ServeHTTP answers requests below /network/.
func (d *Daemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := d.handler.Load()
	if h == nil {
		control.Answer(w, nil, fmt.Errorf("the network isn't up yet: %w", errdefs.ErrUnavailable))
		return
	}
	h.ServeHTTP(w, r)
}

// Bounds of the waits before something that has failed is tried again; they double between.
const firstRetry, lastRetry = 100 * time.Millisecond, time.Minute

// keep runs f until it ends without an error, as it does with ctx, again and again where it fails.
func (d *Daemon) keep(ctx context.Context, what string, f func(context.Context) error) {
	wait := firstRetry
	for {
		began := time.Now()
		err := f(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		if time.Since(began) > lastRetry {
			wait = firstRetry
		}
		d.log.Error("a part of the network's daemon has failed and is tried again", "to", what, "in", wait, "error", err)
		if !sleep(ctx, wait) {
			return
		}
		wait = min(2*wait, lastRetry)
	}
}

// sleep waits, and says false when ctx has ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
