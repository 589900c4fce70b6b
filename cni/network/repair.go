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

	"github.com/cubesandbox/cube/internal/whole"
)

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
	return s.drop(ctx, a)
}

// Strays lists the taps that are neither a pod's nor ready for one: who made or freed them was killed. Repair and the next Up
// remove them.
func (n *Network) Strays(ctx context.Context) (strays []string, err error) {
	s, err := n.begin(ctx, true) // of others' everything is whole then
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer s.end(&err)
	keys, err := s.keys()
	if err != nil {
		return nil, err
	}
	free, err := s.names(freeDir)
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, name := range free {
		known[n.cfg.Network.TapPrefix+name] = true
	}
	for _, key := range keys {
		var r record
		if _, err := s.read(key, &r); err != nil {
			return nil, err
		}
		if r.Pod != nil || r.Open != nil {
			known[s.tapName(r.Tap)] = true
		}
	}
	links, err := s.strays(known)
	for _, l := range links {
		strays = append(strays, l.Attrs().Name)
	}
	return strays, err
}

// Repair puts in order what killed processes have left half done, as Up does.
func (n *Network) Repair(ctx context.Context) (err error) {
	s, err := n.begin(ctx, true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer s.end(&err)
	return s.repair()
}

// repair removes what belongs to no attachment: files, taps, sandboxes of the datapath. It is alone.
func (s *session) repair() error {
	owned, err := s.owned()
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
		switch _, taken := owned.taps[number]; {
		case taken:
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
	for dir, owned := range map[string]map[string]bool{addressesDir: owned.addresses, portsDir: owned.ports} {
		used, err := s.names(dir)
		errs = append(errs, err)
		for _, name := range used {
			if !owned[name] {
				errs = append(errs, s.unmark(dir, name))
			}
		}
	}
	return errors.Join(append(errs, s.removeStrays(known), s.removeHooks(), s.removeSandboxes(owned.taps))...)
}

// owned is what attachments have.
type owned struct {
	taps             map[int]bool // with whether they are open
	addresses, ports map[string]bool
}

// owned returns what attachments have, and removes those that are nobody's: whoever made or freed them was killed.
func (s *session) owned() (*owned, error) {
	keys, err := s.keys()
	if err != nil {
		return nil, err
	}
	o := &owned{taps: map[int]bool{}, addresses: map[string]bool{}, ports: map[string]bool{}}
	for _, key := range keys {
		var r record
		exists, err := s.read(key, &r)
		if err != nil {
			return nil, err
		}
		if !exists || r.Pod == nil && r.Open == nil {
			if err := os.RemoveAll(s.path(attachmentsDir, key)); err != nil {
				return nil, fmt.Errorf("remove attachment %s: %w", key, err)
			}
			continue
		}
		o.taps[r.Tap] = r.Open != nil
		if r.Open == nil {
			continue
		}
		o.addresses[r.Open.Address.String()] = true
		for _, p := range r.Open.Ports {
			o.ports[portFile(p)] = true
		}
	}
	return o, nil
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
	strays, err := s.strays(known)
	errs := []error{err}
	for _, l := range strays {
		errs = append(errs, s.removeLink(l))
	}
	return errors.Join(errs...)
}

// strays lists our taps but for those that are known.
func (s *session) strays(known map[string]bool) (strays []netlink.Link, err error) {
	links, err := whole.List(s.links.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		number, ours := strings.CutPrefix(a.Name, s.cfg.Network.TapPrefix)
		if _, err := strconv.Atoi(number); err == nil && ours && l.Type() == "tuntap" && a.Alias == alias && !known[a.Name] {
			strays = append(strays, l)
		}
	}
	return strays, nil
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
