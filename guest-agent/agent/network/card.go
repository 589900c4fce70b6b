package network

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// Card is the guest's network card. Its methods may be called from many goroutines.
type Card struct {
	name string

	mu  sync.Mutex // makes a change one step; the kernel answers at once
	has *Config    // what it was given last, nil for nothing
	// tried is an address that the card may have, although it was not given all of that configuration.
	tried netip.Prefix
}

// NewCard returns the card of that name, which has never been up.
func NewCard(name string) *Card { return &Card{name: name} }

// Configure gives the card what it is to have: with nil it is down. anew is for a guest that may have been restored: what
// the card knows of its neighbours is of another time then, and forgotten. Without, nothing that stays the same is
// interrupted.
func (c *Card) Configure(n *Config, anew bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n == nil && !c.tried.IsValid() {
		return nil
	}
	index, err := find(c.name)
	if err != nil {
		return fmt.Errorf("network card %s: %w", c.name, err)
	}
	if n != nil && !anew && c.has != nil && c.has.Address == n.Address && c.has.Gateway == n.Gateway {
		err = send(
			setLink("set its MTU", index, 0, 0, uint32(n.MTU)),
			neighbour("set its gateway's MAC address", index, n.Gateway, n.GatewayMAC),
		)
	} else {
		err = c.replace(index, n)
	}
	if err != nil {
		return fmt.Errorf("configure network card %s: %w", c.name, err)
	}
	c.has = n
	return nil
}

// replace makes n of whatever there is. A card that goes down forgets its neighbours and routes.
func (c *Card) replace(index uint32, n *Config) error {
	var m []message
	if c.tried.IsValid() {
		m = append(m,
			setLink("take it down", index, 0, unix.IFF_UP, 0),
			deleteAddress("remove its address", index, c.tried),
		)
	}
	c.has, c.tried = nil, netip.Prefix{}
	if n != nil {
		c.tried = n.Address
		m = append(m,
			addAddress("give it its address", index, n.Address),
			setLink("bring it up", index, unix.IFF_UP, unix.IFF_UP, uint32(n.MTU)),
			neighbour("set its gateway's MAC address", index, n.Gateway, n.GatewayMAC),
			defaultRoute("set its gateway", index, n.Gateway),
		)
	}
	return send(m...)
}

// find returns the index of a device.
func find(name string) (uint32, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, r); err != nil {
		return 0, err
	}
	return r.Uint32(), nil
}

// ResolvConf is the resolv.conf(5) that goes with the network, nil if there is none.
func (c *Card) ResolvConf() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.has == nil {
		return nil
	}
	return resolvConf(c.has.Nameservers)
}

func resolvConf(servers []netip.Addr) []byte {
	var b bytes.Buffer
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	return b.Bytes()
}
