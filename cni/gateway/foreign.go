package gateway

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// Verdicts, linux/netfilter.h.
const nfDrop, nfAccept = 0, 1

// docker forwards itself.
const docker = "Docker"

// foreignTable is somebody else's nftables table that decides on forwarded IPv4 packets. What iptables (its nf_tables
// variant), ufw and Docker do is in such tables too.
type foreignTable struct {
	family  byte
	name    string
	legacy  bool     // of iptables' older variant
	forward []string // base chains of the forward hook
	drops   string   // the one of them with the policy drop
	chains  map[string]bool
	// in and out say that packets from and to the gateway device are accepted by a rule of the table.
	in, out bool
}

func (t *foreignTable) String() string {
	switch {
	case t.legacy:
		return "iptables-legacy's table " + t.name
	case t.family == unix.NFPROTO_INET:
		return "nftables table inet " + t.name
	}
	return "nftables table ip " + t.name
}

// foreignTables lists those with a chain at the forward hook.
func foreignTables(n *config.Network) ([]*foreignTable, error) {
	messages, err := dump(unix.NFPROTO_UNSPEC, unix.NFT_MSG_GETCHAIN)
	if err != nil {
		return nil, err
	}
	all := map[string]*foreignTable{}
	var order []*foreignTable
	for _, m := range messages {
		family, a, err := attributes(m)
		if err != nil {
			return nil, err
		}
		table, name := text(a[unix.NFTA_CHAIN_TABLE]), text(a[unix.NFTA_CHAIN_NAME])
		if family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_INET || family == unix.NFPROTO_INET && table == n.NFTable {
			continue
		}
		key := fmt.Sprint(family, table)
		t := all[key]
		if t == nil {
			t = &foreignTable{family: family, name: table, chains: map[string]bool{}}
			all[key], order = t, append(order, t)
		}
		t.chains[name] = true
		hook, err := nested(a[unix.NFTA_CHAIN_HOOK])
		if err != nil {
			return nil, err
		}
		if number(hook[unix.NFTA_HOOK_HOOKNUM]) != unix.NF_INET_FORWARD || hook[unix.NFTA_HOOK_HOOKNUM] == nil || text(a[unix.NFTA_CHAIN_TYPE]) != "filter" {
			continue
		}
		t.forward = append(t.forward, name)
		if policy := a[unix.NFTA_CHAIN_POLICY]; policy != nil && number(policy) == nfDrop {
			t.drops = name
		}
	}
	var out []*foreignTable
	for _, t := range order {
		if len(t.forward) == 0 {
			continue
		}
		if err := t.lookForAccepts(n.Device); err != nil {
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

func number(b []byte) int {
	if len(b) != 4 {
		return -1
	}
	return int(int32(binary.BigEndian.Uint32(b)))
}

// lookForAccepts looks for rules that somebody has made for the gateway device.
func (t *foreignTable) lookForAccepts(dev string) error {
	messages, err := dump(t.family, unix.NFT_MSG_GETRULE)
	if err != nil {
		return err
	}
	for _, m := range messages {
		family, a, err := attributes(m)
		if err != nil {
			return err
		}
		if family != t.family || text(a[unix.NFTA_RULE_TABLE]) != t.name {
			continue
		}
		list, err := expressions(a[unix.NFTA_RULE_EXPRESSIONS])
		if err != nil {
			return err
		}
		in, out, err := accepts(list, dev)
		if err != nil {
			return err
		}
		t.in, t.out = t.in || in, t.out || out
	}
	return nil
}

// accepts says whether a rule accepts what comes from, or goes to, the device. Rules that name the device through sets or
// wildcards aren't recognised.
func accepts(list []expression, dev string) (in, out bool, err error) {
	accept := false
	key := -1
	for _, e := range list {
		a, err := nested(e.data)
		if err != nil {
			return false, false, err
		}
		switch e.name {
		case "meta":
			key = number(a[unix.NFTA_META_KEY])
		case "cmp":
			value, err := nested(a[unix.NFTA_CMP_DATA])
			if err != nil {
				return false, false, err
			}
			if text(value[unix.NFTA_DATA_VALUE]) == dev && number(a[unix.NFTA_CMP_OP]) == unix.NFT_CMP_EQ {
				in = in || key == unix.NFT_META_IIFNAME
				out = out || key == unix.NFT_META_OIFNAME
			}
		case "immediate":
			value, err := nested(a[unix.NFTA_IMMEDIATE_DATA])
			if err != nil {
				return false, false, err
			}
			verdict, err := nested(value[unix.NFTA_DATA_VERDICT])
			if err != nil {
				return false, false, err
			}
			accept = accept || verdict != nil && number(verdict[unix.NFTA_VERDICT_CODE]) == nfAccept
		}
	}
	return in && accept, out && accept, nil
}

// checkForeign names those whose rules stop sandboxes' packets, or are stopped by ours, and what to do.
func checkForeign(n *config.Network, rec *record) ([]Finding, error) {
	tables, err := foreignTables(n)
	if err != nil {
		return nil, err
	}
	legacy, err := legacyTable(n.Device)
	if err != nil {
		return nil, err
	}
	if legacy != nil {
		tables = append(tables, legacy)
	}
	var out []Finding
	for _, t := range tables {
		who, fix := t.owner(n.Device)
		switch {
		case t.in && t.out:
		case t.drops != "":
			out = append(out, Finding{Blocked, fmt.Sprintf("chain %s of %s (%s) drops what it doesn't know, and so sandboxes' packets", t.drops, t, who), fix})
		case t.name == "firewalld":
			out = append(out, Finding{Blocked, fmt.Sprintf("%s (%s) rejects what it doesn't know, and so sandboxes' packets", t, who), fix})
		}
		if who == docker && rec != nil && rec.Forwarding != nil {
			out = append(out, Finding{Hint, who + " has come since Cube, which found a host that forwards nothing and lets it forward nothing else",
				"set net.ipv4.ip_forward = 1 in /etc/sysctl.d, then cube down --purge, sysctl --system, cube up"})
		}
	}
	return out, nil
}

// owner tells who made the table, as far as its chains tell, and how to have it let sandboxes' packets pass.
func (t *foreignTable) owner(dev string) (who, fix string) {
	command := "iptables"
	if t.legacy {
		command = "iptables-legacy"
	}
	accepts := func(chain string) string {
		return fmt.Sprintf("%s -I %s -i %s -j ACCEPT; %[1]s -I %[2]s -o %[3]s -j ACCEPT", command, chain, dev)
	}
	switch {
	case t.name == "firewalld":
		return "firewalld", fmt.Sprintf("firewall-cmd --permanent --zone=trusted --add-interface=%s && firewall-cmd --reload", dev)
	case t.has("ufw-"):
		return "ufw", fmt.Sprintf("ufw route allow in on %s; ufw route allow out on %[1]s", dev)
	case t.has("DOCKER-USER"):
		return docker, accepts("DOCKER-USER")
	case t.name == "filter" && t.family == unix.NFPROTO_IPV4 && t.chains["FORWARD"]:
		return "iptables", accepts("FORWARD")
	}
	return "unknown", fmt.Sprintf("let it accept what has %q as its incoming or its outgoing device", dev)
}

func (t *foreignTable) has(prefix string) bool {
	for c := range t.chains {
		if strings.HasPrefix(c, prefix) {
			return true
		}
	}
	return false
}
