package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"github.com/containerd/errdefs"
	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/undo"
)

// lockTimeout bounds the wait for another Up or Down.
const lockTimeout = 30 * time.Second

// Gateway is the gateway as Up left it.
type Gateway struct {
	Index  int // of the device
	Uplink     // as Watch saw it last

	cfg    *config.Config
	h      *netlink.Handle
	events *mdl.Conn
}

// Up puts the gateway in force, whatever there is of it already, and what is right stays untouched: connections go on.
// Nothing of a configuration before is left. Of a first Up that fails nothing is left either, and the guards are there
// before a packet can be. Close the result; that changes nothing in force.
func Up(ctx context.Context, cfg *config.Config) (_ *Gateway, err error) {
	unlock, err := makeLock(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer unlock()
	h, err := netlink.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return removeDir(cfg.NetworkDir()) })
	u.Push(func() error { h.Close(); return nil })
	g := &Gateway{cfg: cfg, h: h}
	if g.events, err = subscribe(); err != nil {
		return nil, err
	}
	u.Push(g.events.Close)

	n := &cfg.Network
	before, err := readRecord(cfg.NetworkDir())
	if err != nil {
		return nil, err
	}
	if before != nil && !sameObjects(&before.Network, n) {
		if err := before.remove(h); err != nil {
			return nil, err
		}
		before = nil
	}
	if err := checkPool(h, n); err != nil {
		return nil, err
	}
	rec := &record{}
	if before != nil {
		*rec = *before
	} else {
		if err := checkTable(h, n); err != nil {
			return nil, err
		}
		u.Push(func() error { return errors.Join(rec.remove(h), removeRecord(cfg.NetworkDir())) })
	}
	if g.Index, g.Uplink, err = rec.ensure(h, n, cfg.NetworkDir()); err != nil {
		return nil, err
	}
	return g, nil
}

// ensure has all of it in force, from the inside out: no packet comes in before the device is up, and that is last. It
// returns the device's index.
func (r *record) ensure(h *netlink.Handle, n *config.Network, dir string) (index int, up Uplink, err error) {
	r.Network = *n
	if r.Forwarding == nil {
		if r.Forwarding, err = observeForwarding(); err != nil {
			return 0, up, err
		}
	}
	if err := r.write(dir); err != nil {
		return 0, up, err
	}
	if err := r.ensureRules(n); err != nil {
		return 0, up, err
	}
	if err := r.write(dir); err != nil {
		return 0, up, err
	}
	if err := ensureSteering(h, n); err != nil {
		return 0, up, err
	}
	if err := setSysctl(ipForward, "1"); err != nil {
		return 0, up, err
	}
	if up, err = lookUplink(h); err != nil {
		return 0, up, err
	}
	l, err := ensureDevice(h, n, up.MTU)
	if err != nil {
		return 0, up, err
	}
	return l.Attrs().Index, up, nil
}

// ensureRules installs the rules where other ones are in force.
func (r *record) ensureRules(n *config.Network) error {
	chains := ruleset(n, r.Forwarding != nil)
	want, err := fingerprint(n, chains)
	if err != nil {
		return err
	}
	have, err := inForce(n.NFTable)
	if err != nil {
		return err
	}
	if have != "" && r.Ruleset == want && r.InForce == have {
		return nil
	}
	if err := install(n, chains); err != nil {
		return err
	}
	r.Ruleset = want
	r.InForce, err = inForce(n.NFTable)
	return err
}

// checkTable refuses a table of somebody else's. One of ours without a record is beside a device of ours.
func checkTable(h *netlink.Handle, n *config.Network) error {
	l, err := find(h, n.Device)
	if err != nil || ours(l) {
		return err
	}
	have, err := inForce(n.NFTable)
	if err == nil && have != "" {
		err = fmt.Errorf("nftables table inet %s is there and not Cube's: remove it, or set network.nft_table to another name: %w", n.NFTable, errdefs.ErrAlreadyExists)
	}
	return err
}

// Close releases what the process holds, and leaves all in force. Not during Watch or Repair.
func (g *Gateway) Close() error {
	g.h.Close()
	if err := g.events.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
		return fmt.Errorf("close netlink: %w", err)
	}
	return nil
}

// Down removes all that Up made, from any state, and restores what it changed. That there is nothing is fine. Sandboxes
// have no network after it.
func Down(ctx context.Context, cfg *config.Config) error {
	unlock, err := lock(ctx, cfg)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // Up makes the directory before all else
	} else if err != nil {
		return err
	}
	defer unlock()
	h, err := netlink.NewHandle()
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	rec, err := readRecord(cfg.NetworkDir())
	if err != nil {
		return err
	}
	if rec != nil {
		if err := rec.remove(h); err != nil {
			return err
		}
	}
	return removeRecord(cfg.NetworkDir())
}

// remove takes away what the record tells of: the device first, so that nothing comes in while the guards go.
func (r *record) remove(h *netlink.Handle) error {
	n := &r.Network
	l, err := find(h, n.Device)
	if err != nil {
		return err
	}
	if ours(l) {
		if err := h.LinkDel(l); err != nil {
			return fmt.Errorf("remove device %s: %w", n.Device, err)
		}
	}
	var errs []error
	if r.Forwarding != nil {
		errs = append(errs, r.Forwarding.restore())
	}
	errs = append(errs, removeSteering(h, n), forget(h, n))
	if r.Forwarding == nil || errs[0] == nil { // the guard holds while the host forwards
		errs = append(errs, uninstall(n.NFTable))
	}
	return errors.Join(errs...)
}

// makeLock is lock with a directory that may have to be made, or go meanwhile.
func makeLock(ctx context.Context, cfg *config.Config) (func(), error) {
	for {
		if err := os.MkdirAll(cfg.NetworkDir(), 0o700); err != nil {
			return nil, fmt.Errorf("make the gateway's directory: %w", err)
		}
		unlock, err := lock(ctx, cfg)
		if !errors.Is(err, fs.ErrNotExist) {
			return unlock, err
		}
	}
}

func lock(ctx context.Context, cfg *config.Config) (func(), error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(lockTimeout))
	defer cancel()
	unlock, err := flock.LockDir(ctx, cfg.NetworkDir(), false)
	if err != nil {
		return nil, fmt.Errorf("wait for another change of the network: %w", err)
	}
	return unlock, nil
}

// forget removes the connections of sandboxes from the kernel's table.
func forget(h *netlink.Handle, n *config.Network) error {
	_, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.FAMILY_V4, ofPool(*n))
	if err != nil {
		return fmt.Errorf("forget the connections of %s: %w", n.Pool, err)
	}
	return nil
}

// ofPool matches connections from or to the pool.
type ofPool config.Network

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (p ofPool) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	for _, ip := range [][]byte{f.Forward.SrcIP, f.Forward.DstIP} {
		if a, ok := netip.AddrFromSlice(ip); ok && p.Pool.Contains(a.Unmap()) {
			return true
		}
	}
	return false
}
