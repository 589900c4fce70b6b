package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The one filter of ours in a direction of a device: before all others by its priority.
const (
	filterPriority = 1
	filterHandle   = 1
)

func parent(p point) uint32 {
	if p.egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

func filter(h hook) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: h.ifindex, Parent: parent(h.point), Handle: filterHandle, Protocol: unix.ETH_P_ALL, Priority: filterPriority,
		},
		Name: h.point.name, DirectAction: true,
	}
}

func clsact(ifindex int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// attachFilter puts the program into the device's clsact qdisc, in place of another of ours. A filter stays without being
// pinned; a directory tells that it is there.
func attachFilter(dir string, h hook, prog *ebpf.Program) (fresh bool, err error) {
	if err := netlink.QdiscAdd(clsact(h.ifindex)); err != nil && !errors.Is(err, unix.EEXIST) {
		return false, fmt.Errorf("add a clsact qdisc: %w", err)
	}
	have, err := firstFilter(h)
	if err != nil {
		return false, err
	}
	// The record first: what it tells of and isn't there can be detached all the same.
	if err := os.Mkdir(h.pin(filtersDir(dir)), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	f := filter(h)
	f.Fd = prog.FD()
	if err := netlink.FilterReplace(f); err != nil {
		return false, errors.Join(fmt.Errorf("set the filter: %w", err), detachFilter(dir, h))
	}
	return have == 0, nil
}

// detachFilter removes the filter, and the qdisc if nobody else has filters in it.
func detachFilter(dir string, h hook) error {
	pin := h.pin(filtersDir(dir))
	if _, err := os.Stat(pin); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	filters := 0
	for _, p := range []point{tapIn, tapOut} {
		found, err := listFilters(hook{h.ifindex, p})
		if err != nil {
			return err
		}
		for _, f := range found {
			if p.egress != h.point.egress || !ours(f, h.point) {
				filters++
			} else if err := netlink.FilterDel(f); err != nil && !gone(err) {
				return fmt.Errorf("remove the filter: %w", err)
			}
		}
	}
	if filters == 0 {
		if err := netlink.QdiscDel(clsact(h.ifindex)); err != nil && !gone(err) {
			return fmt.Errorf("remove the clsact qdisc: %w", err)
		}
	}
	return os.Remove(pin)
}

// ours tells the datapath's filters from what somebody else has on a device that got the number of one that is gone.
func ours(f netlink.Filter, p point) bool {
	b, ok := f.(*netlink.BpfFilter)
	return ok && b.Name == p.name && b.Priority == filterPriority && b.Handle == filterHandle
}

// gone tells of errors for a device, qdisc or filter that isn't there.
func gone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL)
}

func listFilters(h hook) ([]netlink.Filter, error) {
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: h.ifindex}}
	found, err := netlink.FilterList(l, parent(h.point))
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	return found, nil
}

// firstFilter returns the first program of a direction of a device; 0: it has none, or another filter is before it.
func firstFilter(h hook) (ebpf.ProgramID, error) {
	found, err := listFilters(h)
	if err != nil || len(found) == 0 {
		return 0, err
	}
	first, ok := found[0].(*netlink.BpfFilter)
	if !ok {
		return 0, nil
	}
	return ebpf.ProgramID(first.Id), nil
}
