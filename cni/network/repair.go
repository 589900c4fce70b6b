package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
)

// Up makes what Open and Claim need, once the gateway is up: it loads the datapath, has it take over from the process
// before, and puts in order what that left half done. What is open goes on. The caller reaps the datapath's flows and closes
// it; that changes nothing in force.
func (n *Network) Up(ctx context.Context, g *gateway.Gateway) (_ *bpf.Datapath, err error) {
	unlock, err := n.lock(ctx, n.cfg.NetworkDir(), false)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{tapsDir, freeDir, addressesDir, attachmentsDir} {
		if err := os.Mkdir(n.path(dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			unlock()
			return nil, fmt.Errorf("make the network's directories: %w", err)
		}
	}
	d, err := bpf.Open(n.datapath(g.Index))
	unlock()
	if err != nil {
		return nil, err
	}
	if err := n.takeOver(ctx, d); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (n *Network) takeOver(ctx context.Context, d *bpf.Datapath) (err error) {
	s, err := n.begin(ctx, true)
	if err != nil {
		return err
	}
	defer s.end(&err)
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

// reopen adds to the datapath what was open and isn't in its maps: they are of another layout, or Open was killed.
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
	var errs []error
	for _, key := range keys {
		if err := s.reopenOne(ctx, key, have); err != nil {
			errs = append(errs, fmt.Errorf("open the network of %s again: %w", key, err))
		}
	}
	return errors.Join(errs...)
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
	rows, err := s.compile(a.Open.Policy)
	if err != nil {
		return err
	}
	return s.openTap(a, rows)
}

// GC closes all of a CNI network that isn't to be kept, and puts in order what killed processes left half done. One that
// can't be closed doesn't keep the others.
func (n *Network) GC(ctx context.Context, network string, keep func(id, ifName string) bool) (err error) {
	s, err := n.begin(ctx, true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer s.end(&err)
	keys, err := s.keys()
	if err != nil {
		return err
	}
	var errs []error
	for _, key := range keys {
		if err := s.collect(ctx, key, network, keep); err != nil {
			errs = append(errs, fmt.Errorf("collect %s: %w", key, err))
		}
	}
	return errors.Join(append(errs, s.repair())...)
}

func (s *session) collect(ctx context.Context, key, network string, keep func(id, ifName string) bool) (err error) {
	a, err := s.take(ctx, key, false)
	if err != nil {
		return err
	}
	defer s.done(a, &err)
	if a.Open == nil || a.Open.Network != network || keep(key, a.Open.IfName) || keep(criNamespace+"-"+key, a.Open.IfName) {
		return nil
	}
	if err := s.close(a); err != nil {
		return err
	}
	return s.settle(a)
}

// repair removes what belongs to no attachment: files, taps, sandboxes of the datapath. It is alone.
func (s *session) repair() error {
	taps, addresses, err := s.owned()
	if err != nil {
		return err
	}
	numbers, err := s.numbers()
	if err != nil {
		return err
	}
	free, err := s.names(freeDir)
	if err != nil {
		return err
	}
	ready := map[string]bool{}
	for _, name := range free {
		ready[name] = true
	}
	var errs []error
	known := map[string]bool{}
	for _, number := range numbers {
		name := strconv.Itoa(number)
		switch _, owned := taps[number]; {
		case owned:
			errs = append(errs, s.unmark(freeDir, name))
		case !ready[name] || s.datapath == nil:
			errs = append(errs, s.removeTap(number))
			continue
		default:
			if _, err := s.tap(number); err != nil {
				errs = append(errs, s.removeTap(number))
				continue
			}
		}
		known[s.tapName(number)] = true
		delete(ready, name)
	}
	for name := range ready {
		errs = append(errs, s.unmark(freeDir, name))
	}
	used, err := s.names(addressesDir)
	errs = append(errs, err)
	for _, name := range used {
		if !addresses[name] {
			errs = append(errs, s.unmark(addressesDir, name))
		}
	}
	return errors.Join(append(errs, s.removeStrays(known), s.removeHooks(), s.removeSandboxes(taps))...)
}

// owned returns which taps and addresses are attachments', with whether they are open, and removes the directories of none.
func (s *session) owned() (taps map[int]bool, addresses map[string]bool, err error) {
	keys, err := s.keys()
	if err != nil {
		return nil, nil, err
	}
	taps, addresses = map[int]bool{}, map[string]bool{}
	for _, key := range keys {
		var r record
		exists, err := s.read(key, &r)
		if err != nil {
			return nil, nil, err
		}
		if !exists {
			if err := os.RemoveAll(s.path(attachmentsDir, key)); err != nil {
				return nil, nil, fmt.Errorf("remove attachment %s: %w", key, err)
			}
			continue
		}
		taps[r.Tap] = r.Open != nil
		if r.Open != nil {
			addresses[r.Open.Address.String()] = true
		}
	}
	return taps, addresses, nil
}

// numbers lists the taps.
func (s *session) numbers() ([]int, error) {
	names, err := s.names(tapsDir)
	if err != nil {
		return nil, err
	}
	numbers := make([]int, 0, len(names))
	for _, name := range names {
		number, err := strconv.Atoi(name)
		if err != nil || !validNumber(number) {
			return nil, fmt.Errorf("%s is not ours", s.path(tapsDir, name))
		}
		numbers = append(numbers, number)
	}
	return numbers, nil
}

// removeStrays removes taps that nothing tells of.
func (s *session) removeStrays(known map[string]bool) error {
	links, err := s.links.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		a := l.Attrs()
		number, ours := strings.CutPrefix(a.Name, s.cfg.Network.TapPrefix)
		if _, err := strconv.Atoi(number); err == nil && ours && l.Type() == "tuntap" && a.Alias == alias && !known[a.Name] {
			errs = append(errs, s.removeLink(l))
		}
	}
	return errors.Join(errs...)
}

// removeHooks forgets the programs of devices that somebody else has removed.
func (s *session) removeHooks() error {
	if s.datapath == nil {
		return nil
	}
	taps, err := s.datapath.Taps()
	if err != nil {
		return err
	}
	var errs []error
	for _, index := range taps {
		_, err := s.links.LinkByIndex(index)
		var none netlink.LinkNotFoundError
		if errors.As(err, &none) {
			err = s.datapath.DetachTap(index)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeSandboxes closes what is open and should not be.
func (s *session) removeSandboxes(taps map[int]bool) error {
	if s.datapath == nil {
		return nil
	}
	sandboxes, err := s.datapath.Sandboxes()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range sandboxes {
		if taps[int(id)] {
			continue
		}
		if _, err := s.datapath.RemoveSandbox(id); err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
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
	for _, dir := range []string{attachmentsDir, addressesDir, freeDir, tapsDir} {
		if err := os.RemoveAll(n.path(dir)); err != nil {
			return fmt.Errorf("remove the network's state: %w", err)
		}
	}
	return bpf.Remove(n.datapath(0).Dir)
}
