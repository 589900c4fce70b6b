package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// connections is the set that counts sandboxes' connections.
const connections = "connections"

// chain is a chain of the table; one with a hook is where packets come in, with the policy accept.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	rules    []rule
}

// ruleset returns the table's chains, those that are jumped to first. With onlyOurs, nothing but sandboxes' packets is
// forwarded.
func ruleset(n *config.Network, onlyOurs bool) []chain {
	m, dev, gateway := n.Marks(), n.Device, netip.PrefixFrom(n.Gateway(), 32)
	forward := []rule{
		rules(from(dev), jump("from-sandboxes")),
		rules(to(dev), jump("to-sandboxes")),
	}
	if onlyOurs {
		forward = append(forward, rules(drop()))
	}
	return []chain{
		{name: "to-resolver", rules: []rule{
			rules(ipv4(), protocol(unix.IPPROTO_UDP), toPort(53), redirect(n.DNSPort)),
			rules(ipv4(), protocol(unix.IPPROTO_TCP), toPort(53), redirect(n.DNSPort)),
		}},
		{name: "begin", rules: []rule{
			rules(ipv4(), state(expr.CtStateBitNEW), first(), moreThan(n.MaxFlows, connections), drop()),
			rules(marked(m.Resolver, m.Mask), jump("to-resolver")),
		}},
		{name: "to-host", rules: []rule{
			rules(notIPv4(), drop()),
			rules(state(expr.CtStateBitINVALID), drop()),
			// Without a proxy, a packet that is for it would get to whatever else listens on its port.
			rules(marked(m.Proxy, m.Mask), protocol(unix.IPPROTO_TCP), transparent(), accept()),
			rules(marked(m.Resolver, m.Mask), within(ipTarget, gateway), protocol(unix.IPPROTO_UDP), toPort(n.DNSPort), accept()),
			rules(marked(m.Resolver, m.Mask), within(ipTarget, gateway), protocol(unix.IPPROTO_TCP), toPort(n.DNSPort), accept()),
			// Answers to the host's own connections to sandboxes, and errors of them.
			rules(marked(m.Direct, m.Mask), state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
			rules(drop()),
		}},
		{name: "from-sandboxes", rules: []rule{
			rules(notIPv4(), drop()),
			// What is for the proxy or the resolver and got here goes nowhere, like what no datapath has looked at.
			rules(notMarked(m.Direct, m.Mask), drop()),
			rules(outside(ipSource, n.Pool), drop()),
			// It would not be masqueraded.
			rules(state(expr.CtStateBitINVALID), drop()),
			rules(to(dev), drop()),
			rules(accept()),
		}},
		{name: "to-sandboxes", rules: []rule{
			rules(state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
			rules(drop()),
		}},
		{
			name: "prerouting", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: *nftables.ChainPriorityMangle,
			rules: []rule{rules(marked(m.Proxy, m.Mask), from(dev), protocol(unix.IPPROTO_TCP), tproxy(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), n.ProxyPort)), accept())},
		},
		{
			// The kernel asks this chain about a connection's first packet only.
			name: "redirect", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPrerouting, priority: *nftables.ChainPriorityNATDest,
			rules: []rule{rules(from(dev), jump("begin"))},
		},
		{
			name: "input", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput, priority: *nftables.ChainPriorityFilter,
			rules: []rule{
				rules(from(dev), jump("to-host")),
				// The gateway's address is for sandboxes and the host only.
				rules(notFrom("lo"), ipv4(), within(ipTarget, gateway), drop()),
			},
		},
		{
			name: "forward", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward, priority: *nftables.ChainPriorityFilter,
			rules: forward,
		},
		{
			name: "masquerade", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, priority: *nftables.ChainPriorityNATSource,
			rules: []rule{rules(notTo(dev), notTo("lo"), ipv4(), within(ipSource, n.Pool), masquerade())},
		},
		{
			// After the masquerade: what still has an address of the pool must not get out.
			name: "leave", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPostrouting, priority: 300,
			rules: []rule{rules(notTo(dev), ipv4(), within(ipSource, n.Pool), notTo("lo"), drop())},
		},
	}
}

// fingerprint tells rulesets apart.
func fingerprint(n *config.Network, chains []chain) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s %d\n", n.NFTable, setSize(n))
	for _, c := range chains {
		fmt.Fprintf(h, "%s %s %d\n", c.name, c.kind, c.priority)
		if c.hook != nil {
			fmt.Fprintln(h, *c.hook)
		}
		for _, r := range c.rules {
			for _, e := range r {
				b, err := expr.Marshal(unix.NFPROTO_INET, e)
				if err != nil {
					return "", fmt.Errorf("encode a rule of %s: %w", c.name, err)
				}
				h.Write(b)
			}
			h.Write([]byte{'\n'})
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// setSize is how many sandboxes can have connections.
func setSize(n *config.Network) uint32 { return 1 << (32 - n.Pool.Bits()) }
