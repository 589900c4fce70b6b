package gateway

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// install puts the chains in force in one transaction, in the place of the table as it was: no packet passes between.
func install(n *config.Network, chains []chain) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	t := &nftables.Table{Name: n.NFTable, Family: nftables.TableFamilyINet}
	c.AddTable(t) // so that there is one to delete
	c.DelTable(t)
	c.AddTable(t)
	set := &nftables.Set{Table: t, Name: connections, Dynamic: true, KeyType: nftables.TypeIPAddr, Size: setSize(n)}
	if err := c.AddSet(set, nil); err != nil {
		return fmt.Errorf("encode nftables set %s: %w", set.Name, err)
	}
	accept := nftables.ChainPolicyAccept
	for _, ch := range chains {
		nc := &nftables.Chain{Name: ch.name, Table: t}
		if ch.hook != nil {
			nc.Type, nc.Hooknum, nc.Priority, nc.Policy = ch.kind, ch.hook, nftables.ChainPriorityRef(ch.priority), &accept
		}
		c.AddChain(nc)
		for _, r := range ch.rules {
			c.AddRule(&nftables.Rule{Table: t, Chain: nc, Exprs: r})
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("install nftables table %s, for which the kernel must have nftables with ct, connlimit, masquerade, redirect, socket and tproxy: %w", n.NFTable, err)
	}
	return nil
}

// uninstall removes the table; that there is none is fine.
func uninstall(name string) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	c.DelTable(&nftables.Table{Name: name, Family: nftables.TableFamilyINet})
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove nftables table %s: %w", name, err)
	}
	return nil
}
