package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
)

// Up makes what Open and Claim need, once the gateway is up: it loads the datapath, has it take over from the process
// before, and puts in order what that left half done. What is open goes on. The caller reaps the datapath's flows and closes
// it; that changes nothing in force.
func (n *Network) Up(ctx context.Context, g *gateway.Gateway) (*bpf.Datapath, error) {
	unlock, err := n.lock(ctx, n.cfg.NetworkDir(), false)
	if err != nil {
		return nil, err
	}
	d, err := n.load(g.Index)
	if err != nil {
		unlock()
		return nil, err
	}
	s, err := n.locked(unlock)
	if err == nil {
		err = s.takeOver(ctx, d)
		s.end(&err)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (n *Network) load(gatewayIndex int) (*bpf.Datapath, error) {
	for _, dir := range stateDirs {
		if err := os.Mkdir(n.path(dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("make the network's directories: %w", err)
		}
	}
	return bpf.Open(n.datapath(gatewayIndex))
}

// takeOver has the devices run the programs of this process, and sees to what the one before has left.
func (s *session) takeOver(ctx context.Context, d *bpf.Datapath) error {
	if s.gateway == nil || s.datapath == nil {
		return notUp("the gateway has gone")
	}
	if err := d.AttachGateway(); err != nil {
		return err
	}
	numbers, err := s.numbers()
	if err != nil {
		return err
	}
	for _, number := range numbers {
		l, err := s.find(s.tapName(number))
		if err != nil {
			return err
		}
		if l == nil || l.Attrs().Alias != alias {
			continue // repair's
		}
		if err := d.AttachTap(l.Attrs().Index); err != nil {
			return err
		}
	}
	if err := errors.Join(s.repair(), s.reopen(ctx)); err != nil {
		return err
	}
	return d.DropOldLayouts()
}

// reopen adds to the datapath what was open and isn't in its maps: they are of another layout, or Open was killed. One that
// can't be opened stays closed, as Check tells, and keeps nobody else from the network.
func (s *session) reopen(ctx context.Context) error {
	sandboxes, err := s.datapath.Sandboxes()
	if err != nil {
		return err
	}
	have := map[bpf.ID]bool{}
	for _, id := range sandboxes {
		have[id] = true
	}
	keys, err := s.keys()
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := s.reopenOne(ctx, key, have); err != nil {
			slog.Error("the network of a sandbox that was open stays closed", "sandbox", key, "error", err)
		}
	}
	return nil
}

func (s *session) reopenOne(ctx context.Context, key string, have map[bpf.ID]bool) (err error) {
	a, err := s.take(ctx, key, false)
	if err != nil {
		return err
	}
	defer s.done(a, &err)
	if a.Open == nil || have[bpf.ID(a.Tap)] {
		return nil
	}
	if l, err := s.find(s.tapName(a.Tap)); err != nil || l == nil {
		return err // there is nothing to open: Check tells of it
	}
	tap, err := s.tap(a.Tap)
	if err != nil {
		return err
	}
	rows, err := s.compile(a.Open.Policy)
	if err != nil {
		return err
	}
	return s.openTap(a, tap, rows)
}

// Clear closes and removes the places of all pods, and the taps that are ready, and leaves the network up: for when no
// machine runs any more. What is written down isn't read, so that nothing there can be in the way.
func (n *Network) Clear(ctx context.Context) (err error) {
	s, err := n.begin(ctx, true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer s.end(&err)
	if err := errors.Join(s.removeSandboxes(nil), s.forgetConnections(n.cfg.Network.Pool), s.removeStrays(nil), s.removeHooks()); err != nil {
		return err
	}
	for _, dir := range stateDirs {
		names, err := s.names(dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := os.RemoveAll(n.path(dir, name)); err != nil {
				return fmt.Errorf("clear the network's state: %w", err)
			}
		}
	}
	return nil
}

// Down removes all of it, from any state, before the gateway goes. Sandboxes have no network from then on. That there is
// nothing is fine.
func (n *Network) Down(ctx context.Context) (err error) {
	s, err := n.begin(ctx, true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer s.end(&err)
	if err := s.removeStrays(nil); err != nil {
		return err
	}
	for _, dir := range stateDirs {
		if err := os.RemoveAll(n.path(dir)); err != nil {
			return fmt.Errorf("remove the network's state: %w", err)
		}
	}
	return bpf.Remove(n.datapath(0).Dir)
}
