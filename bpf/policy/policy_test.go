package policy

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// lookup does what the datapath's map does: the longest prefix decides.
func lookup(t testing.TB, rows []Row, ip netip.Addr) Verdict {
	t.Helper()
	best := -1
	var v Verdict
	for _, r := range rows {
		if r.Prefix.Contains(ip) && r.Prefix.Bits() > best {
			best, v = r.Prefix.Bits(), r.Verdict
		}
	}
	if best < 0 {
		t.Fatalf("%v has no row", ip)
	}
	return v
}

func TestCompile(t *testing.T) {
	guard := Guard{
		Denied:   []netip.Prefix{netip.MustParsePrefix("8.1.0.0/16"), netip.MustParsePrefix("9.9.9.9/32")},
		Openings: []Opening{{To: "10.1.2.0/24", Ports: []string{"5432"}, Protocol: "tcp"}, {To: "8.1.1.1"}},
	}
	allow := func(to, protocol string, ports ...string) Rule {
		return Rule{Action: Direct, To: to, Protocol: protocol, Ports: ports}
	}
	deny := func(to, protocol string, ports ...string) Rule {
		return Rule{Action: Deny, To: to, Protocol: protocol, Ports: ports}
	}
	for _, tc := range []struct {
		name   string
		policy Policy
		to     string
		p      Protocol
		port   uint16
		action Action
		byRule uint16
	}{
		{name: "nothing said, default deny", to: "1.1.1.1", p: TCP, port: 443, action: Deny},
		{name: "nothing said, default allow", policy: Policy{Default: Direct}, to: "1.1.1.1", p: TCP, port: 443, action: Direct},
		{name: "reserved", policy: Policy{Default: Direct}, to: "10.0.0.1", p: TCP, port: 443, action: HardDeny},
		{name: "reserved, allowed by a rule", policy: Policy{Rules: []Rule{allow("10.0.0.1", "")}}, to: "10.0.0.1", p: TCP, port: 443, action: HardDeny},
		{name: "metadata", policy: Policy{Default: Direct, Rules: []Rule{allow("0.0.0.0/0", "")}}, to: "169.254.169.254", p: TCP, port: 80, action: HardDeny},
		{name: "metadata outside of reserved networks", policy: Policy{Default: Direct}, to: "168.63.129.16", p: TCP, port: 80, action: HardDeny},
		{name: "its neighbour", policy: Policy{Default: Direct}, to: "168.63.129.17", p: TCP, port: 80, action: Direct},
		{name: "the host's network", policy: Policy{Default: Direct}, to: "8.1.255.1", p: UDP, port: 1, action: HardDeny},
		{name: "the host's address", policy: Policy{Default: Direct}, to: "9.9.9.9", p: ICMP, action: HardDeny},
		{name: "opened, default deny", to: "10.1.2.3", p: TCP, port: 5432, action: Deny},
		{name: "opened and allowed", policy: Policy{Rules: []Rule{allow("10.0.0.0/8", "tcp")}}, to: "10.1.2.3", p: TCP, port: 5432, action: Direct, byRule: 1},
		{name: "opened for another port", policy: Policy{Default: Direct}, to: "10.1.2.3", p: TCP, port: 5433, action: HardDeny},
		{name: "opened for another protocol", policy: Policy{Default: Direct}, to: "10.1.2.3", p: UDP, port: 5432, action: HardDeny},
		{name: "beside what is opened", policy: Policy{Default: Direct}, to: "10.1.3.3", p: TCP, port: 5432, action: HardDeny},
		{name: "opened within the host's network", policy: Policy{Default: Direct}, to: "8.1.1.1", p: ICMP, action: Direct},
		{name: "allow of a port", policy: Policy{Rules: []Rule{allow("1.0.0.0/8", "tcp", "80", "8000-8010")}}, to: "1.2.3.4", p: TCP, port: 8010, action: Direct, byRule: 1},
		{name: "beside the port", policy: Policy{Rules: []Rule{allow("1.0.0.0/8", "tcp", "80", "8000-8010")}}, to: "1.2.3.4", p: TCP, port: 8011, action: Deny},
		{name: "tcp is not udp", policy: Policy{Rules: []Rule{allow("1.0.0.0/8", "tcp", "443")}}, to: "1.2.3.4", p: UDP, port: 443, action: Deny},
		{name: "any with ports is not icmp", policy: Policy{Rules: []Rule{allow("1.0.0.0/8", "any", "1-65535")}}, to: "1.2.3.4", p: ICMP, action: Deny},
		{name: "icmp", policy: Policy{Rules: []Rule{allow("1.0.0.0/8", "icmp")}}, to: "1.2.3.4", p: ICMP, action: Direct, byRule: 1},
		{name: "allow beats deny in it", policy: Policy{Rules: []Rule{deny("1.2.0.0/16", ""), allow("1.0.0.0/8", "")}}, to: "1.2.3.4", p: TCP, port: 1, action: Direct, byRule: 2},
		{name: "deny beats the default", policy: Policy{Default: Direct, Rules: []Rule{deny("1.2.0.0/16", "")}}, to: "1.2.3.4", p: TCP, port: 1, action: Deny, byRule: 1},
		{name: "proxy beats allow", policy: Policy{Default: Direct, Rules: []Rule{allow("1.2.3.4", ""), {Action: Proxy, To: "0.0.0.0/0", Ports: []string{"443"}, Protocol: "tcp"}}}, to: "1.2.3.4", p: TCP, port: 443, action: Proxy, byRule: 2},
		{name: "last port", policy: Policy{Rules: []Rule{allow("1.0.0.0/8", "tcp", "65535")}}, to: "1.2.3.4", p: TCP, port: 65535, action: Direct, byRule: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rows, err := Compile(tc.policy, guard)
			if err != nil {
				t.Fatal(err)
			}
			action, rule := lookup(t, rows, netip.MustParseAddr(tc.to)).Of(tc.p, tc.port)
			if action != tc.action || rule != tc.byRule {
				t.Errorf("%s by rule %d, not %s by rule %d", action, rule, tc.action, tc.byRule)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	seventeen := make([]string, 17)
	for i := range seventeen {
		seventeen[i] = fmt.Sprint(2*i + 1)
	}
	good := Rule{Action: Direct, To: "1.1.1.1"}
	for _, tc := range []struct {
		name   string
		policy Policy
		guard  Guard
		says   []string
	}{
		{name: "default", policy: Policy{Default: Proxy}, says: []string{"default proxy"}},
		{name: "no address", policy: Policy{Rules: []Rule{good, {Action: Deny, To: "example.com"}}}, says: []string{`rule 2 (deny "example.com")`}},
		{name: "IPv6", policy: Policy{Rules: []Rule{{To: "2001:db8::/32"}}}, says: []string{"rule 1", "IPv6"}},
		{name: "IPv4 in IPv6", policy: Policy{Rules: []Rule{{To: "::ffff:1.2.3.4"}}}, says: []string{"rule 1", "IPv6"}},
		{name: "length", policy: Policy{Rules: []Rule{{To: "1.0.0.0/33"}}}, says: []string{"rule 1"}},
		{name: "bits after the length", policy: Policy{Rules: []Rule{{To: "1.2.3.4/8"}}}, says: []string{"rule 1", "1.0.0.0/8 would be right"}},
		{name: "port 0", policy: Policy{Rules: []Rule{{To: "1.1.1.1", Ports: []string{"0-5"}}}}, says: []string{"rule 1", `port "0-5"`}},
		{name: "port too high", policy: Policy{Rules: []Rule{{To: "1.1.1.1", Ports: []string{"65536"}}}}, says: []string{"rule 1", `port "65536"`}},
		{name: "ports backwards", policy: Policy{Rules: []Rule{{To: "1.1.1.1", Ports: []string{"9-8"}}}}, says: []string{"rule 1", `port "9-8"`}},
		{name: "signed port", policy: Policy{Rules: []Rule{{To: "1.1.1.1", Ports: []string{"+80"}}}}, says: []string{"rule 1", `port "+80"`}},
		{name: "ports of icmp", policy: Policy{Rules: []Rule{{To: "1.1.1.1", Ports: []string{"8"}, Protocol: "icmp"}}}, says: []string{"rule 1", "icmp has no ports"}},
		{name: "protocol", policy: Policy{Rules: []Rule{{To: "1.1.1.1", Protocol: "gre"}}}, says: []string{"rule 1", `protocol "gre"`}},
		{name: "proxied udp", policy: Policy{Rules: []Rule{{Action: Proxy, To: "1.1.1.1", Protocol: "udp"}}}, says: []string{"rule 1", "only tcp"}},
		{name: "a rule that hard-denies", policy: Policy{Rules: []Rule{{Action: HardDeny, To: "1.1.1.1"}}}, says: []string{"rule 1", "action hard-deny"}},
		{name: "too many ranges", policy: Policy{Rules: []Rule{good, {Action: Direct, To: "1.0.0.0/8", Ports: seventeen, Protocol: "tcp"}}}, says: []string{"rule 2", "16 is the most"}},
		{name: "too many rules", policy: Policy{Rules: make([]Rule, MaxRules+1)}, says: []string{"16385 rules"}},
		{name: "opening of loopback", guard: Guard{Openings: []Opening{{To: "10.0.0.1"}, {To: "127.0.0.1", Ports: []string{"80"}}}}, says: []string{`opening 2 ("127.0.0.1" ports 80)`, "127.0.0.0/8"}},
		{name: "opening of all", guard: Guard{Openings: []Opening{{To: "0.0.0.0/0"}}}, says: []string{"opening 1", "can't be opened"}},
		{name: "IPv6 denied", guard: Guard{Denied: []netip.Prefix{netip.MustParsePrefix("fd00::/8")}}, says: []string{"fd00::/8"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rows, err := Compile(tc.policy, tc.guard)
			if !errors.Is(err, errdefs.ErrInvalidArgument) || rows != nil {
				t.Fatalf("%d rows, error %v", len(rows), err)
			}
			for _, s := range tc.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%q does not say %q", err, s)
				}
			}
		})
	}
}

// TestAgainstNaive compares compiled policies with what their rules say, one by one.
func TestAgainstNaive(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	policies := 300
	if testing.Short() {
		policies = 30
	}
	for range policies {
		p, g := randomPolicy(rnd)
		rows, err := Compile(p, g)
		if err != nil {
			if !strings.Contains(err.Error(), "is the most") {
				t.Fatal(err)
			}
			continue
		}
		for range 300 {
			ip, proto, port := randomTarget(rnd, p)
			action, rule := lookup(t, rows, ip).Of(proto, port)
			wantAction, wantRule := naive(t, p, g, ip, proto, port)
			if action != wantAction || rule != wantRule {
				t.Fatalf("%v protocol %d port %d: %s by rule %d, not %s by rule %d\npolicy %+v\nguard %+v", ip, proto, port, action, rule, wantAction, wantRule, p, g)
			}
		}
	}
}

// naive goes through everything for one packet.
func naive(t *testing.T, p Policy, g Guard, ip netip.Addr, proto Protocol, port uint16) (Action, uint16) {
	matches := func(to string, ranges []string, protocol string) bool {
		prefix, err := netip.ParsePrefix(to)
		if err != nil {
			t.Fatal(err)
		}
		name := map[Protocol]string{TCP: "tcp", UDP: "udp", ICMP: "icmp"}[proto]
		if !prefix.Contains(ip) || (protocol != "" && protocol != name) {
			return false
		}
		for _, r := range ranges {
			var first, last uint16
			if n, _ := fmt.Sscanf(r, "%d-%d", &first, &last); n == 2 && proto != ICMP && first <= port && port <= last {
				return true
			}
		}
		return len(ranges) == 0
	}
	hard := false
	for _, d := range append(g.Denied, reserved...) {
		hard = hard || d.Contains(ip)
	}
	for _, o := range g.Openings {
		if matches(o.To, o.Ports, o.Protocol) {
			hard = false
		}
	}
	if hard {
		return HardDeny, 0
	}
	for _, a := range []Action{Proxy, Direct, Deny} {
		for i, r := range p.Rules {
			if r.Action == a && matches(r.To, r.Ports, r.Protocol) {
				return a, uint16(i + 1)
			}
		}
	}
	return p.Default, 0
}

func randomPolicy(rnd *rand.Rand) (Policy, Guard) {
	p := Policy{Default: []Action{Deny, Direct}[rnd.IntN(2)]}
	for range rnd.IntN(12) {
		r := Rule{Action: []Action{Deny, Direct, Proxy}[rnd.IntN(3)], To: randomPrefix(rnd).String(), Protocol: []string{"", "tcp", "udp", "icmp"}[rnd.IntN(4)]}
		if r.Action == Proxy {
			r.Protocol = "tcp"
		}
		if r.Protocol != "icmp" {
			r.Ports = randomPorts(rnd)
		}
		p.Rules = append(p.Rules, r)
	}
	var g Guard
	for range rnd.IntN(3) {
		g.Denied = append(g.Denied, randomPrefix(rnd))
	}
	for range rnd.IntN(3) {
		to := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(rnd.IntN(4)), 0, 0}), 8+rnd.IntN(9)).Masked()
		g.Openings = append(g.Openings, Opening{To: to.String(), Ports: randomPorts(rnd), Protocol: []string{"", "tcp", "udp"}[rnd.IntN(3)]})
	}
	return p, g
}

// randomPrefix has few bits set, so that prefixes are often within each other.
func randomPrefix(rnd *rand.Rand) netip.Prefix {
	ip := netip.AddrFrom4([4]byte{byte(8 + rnd.IntN(4)), byte(rnd.IntN(4)), byte(rnd.IntN(2)), byte(rnd.IntN(2))})
	return netip.PrefixFrom(ip, rnd.IntN(33)).Masked()
}

func randomPorts(rnd *rand.Rand) []string {
	var ports []string
	for range rnd.IntN(3) {
		first := 1 + rnd.IntN(20)
		ports = append(ports, fmt.Sprintf("%d-%d", first, first+rnd.IntN(10)))
	}
	return ports
}

func randomTarget(rnd *rand.Rand, p Policy) (netip.Addr, Protocol, uint16) {
	ip := randomPrefix(rnd).Addr()
	if len(p.Rules) > 0 && rnd.IntN(2) == 0 {
		prefix := netip.MustParsePrefix(p.Rules[rnd.IntN(len(p.Rules))].To)
		ip = prefix.Addr()
		if rnd.IntN(2) == 0 {
			ip = ip.Prev() // just outside of it
		}
		if !ip.IsValid() {
			ip = netip.IPv4Unspecified()
		}
	}
	proto := []Protocol{TCP, UDP, ICMP}[rnd.IntN(3)]
	if proto == ICMP {
		return ip, proto, 0
	}
	return ip, proto, uint16(rnd.IntN(35))
}

// TestManyRules: what a tenant can ask for is compiled or refused in a moment.
func TestManyRules(t *testing.T) {
	p := Policy{Default: Direct}
	for i := range MaxRules {
		p.Rules = append(p.Rules, Rule{Action: Deny, To: fmt.Sprintf("1.%d.%d.0/24", i>>8, i&255), Ports: []string{"25", "100-200"}, Protocol: "tcp"})
	}
	rows, err := Compile(p, Guard{})
	if err != nil {
		t.Fatal(err)
	}
	if want := MaxRules + 1 + len(reserved); len(rows) != want {
		t.Errorf("%d rows, not %d", len(rows), want)
	}
	for i := range p.Rules {
		p.Rules[i].To, p.Rules[i].Ports = "0.0.0.0/0", []string{fmt.Sprint(2*i + 1)}
	}
	if _, err := Compile(p, Guard{}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("rules for %d ports of an address: %v", MaxRules, err)
	}
}

// TestOverlap: rules that all are about each other's addresses are refused before they take long.
func TestOverlap(t *testing.T) {
	overlap := func(everywhere func(i int) Rule) Policy {
		p := Policy{Default: Deny}
		for i := range MaxRules / 2 {
			p.Rules = append(p.Rules, everywhere(i))
		}
		for i := range MaxRules / 2 {
			p.Rules = append(p.Rules, Rule{Action: Direct, To: fmt.Sprintf("1.%d.%d.1", i>>8, i&255), Ports: []string{"80"}, Protocol: "tcp"})
		}
		return p
	}
	const all = "0.0.0.0/0"
	for name, p := range map[string]Policy{
		"the same": overlap(func(int) Rule { return Rule{Action: Direct, To: all, Ports: []string{"443"}, Protocol: "tcp"} }),
		// Of many ports one word is said in the end, but each rule is asked about each of them.
		"hidden": overlap(func(i int) Rule {
			switch {
			case i < MaxRules/4:
				return Rule{Action: Direct, To: all, Ports: []string{"443"}, Protocol: "udp"}
			case i == MaxRules/4:
				return Rule{Action: Direct, To: all, Protocol: "tcp"}
			}
			return Rule{Action: Deny, To: all, Ports: []string{fmt.Sprint(2 * i)}, Protocol: "tcp"}
		}),
	} {
		began := time.Now()
		_, err := Compile(p, Guard{})
		if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "overlap") {
			t.Errorf("%s: %v", name, err)
		}
		t.Logf("%s: refused in %v", name, time.Since(began).Round(time.Millisecond))
	}
}
