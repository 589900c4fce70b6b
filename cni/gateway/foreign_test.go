package gateway

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// Others' rules that stop sandboxes' packets are named with their remedy, and not any more once that is done.
func TestForeign(t *testing.T) {
	const iptables = "iptables -I %s -i cube-gw -j ACCEPT; iptables -I %[1]s -o cube-gw -j ACCEPT"
	for _, tc := range []struct {
		name   string
		family nftables.TableFamily
		table  string
		policy nftables.ChainPolicy
		chain  string // to which the remedy adds, jumped to from the base chain
		who    string
		remedy string
	}{
		{"docker", nftables.TableFamilyIPv4, "filter", nftables.ChainPolicyDrop, "DOCKER-USER", "chain FORWARD of nftables table ip filter (Docker) drops", fmt.Sprintf(iptables, "DOCKER-USER")},
		{"ufw", nftables.TableFamilyIPv4, "filter", nftables.ChainPolicyDrop, "ufw-user-forward", "(ufw) drops", "ufw route allow in on cube-gw; ufw route allow out on cube-gw"},
		{"iptables", nftables.TableFamilyIPv4, "filter", nftables.ChainPolicyDrop, "", "(iptables) drops", fmt.Sprintf(iptables, "FORWARD")},
		{"firewalld", nftables.TableFamilyINet, "firewalld", nftables.ChainPolicyAccept, "filter_FWD_trusted", "(firewalld) rejects", "firewall-cmd --permanent --zone=trusted --add-interface=cube-gw"},
		{"somebody's", nftables.TableFamilyINet, "mine", nftables.ChainPolicyDrop, "", "chain FORWARD of nftables table inet mine (unknown) drops", `"cube-gw" as its incoming or its outgoing device`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t)
			guest := h.guest(h.up(), "10.200.0.11")
			h.marks(h.cfg.Network.Marks().Direct)
			listen(t, h.internet, ":80", "internet")
			var chains []string
			chain := "FORWARD"
			if tc.chain != "" {
				chains, chain = []string{tc.chain}, tc.chain
			}
			insert := others(t, tc.family, tc.table, tc.policy, chains...)
			f := h.found(Broken, Blocked)
			if len(f) != 1 || f[0].Level != Blocked || !strings.Contains(f[0].Detail, tc.who) || !strings.Contains(f[0].Remedy, tc.remedy) {
				t.Fatalf("found %+v", f)
			}
			if tc.policy == nftables.ChainPolicyDrop {
				if got := say(t, guest, "tcp4", internet+":80", nothing); got != "" {
					t.Fatalf("the rules stop nothing: %q", got)
				}
			}
			insert(chain, rules(from("cube-gw"), accept()))
			if f := h.found(Blocked); len(f) != 1 {
				t.Errorf("half of the remedy is enough: %+v", f)
			}
			insert(chain, rules(to("cube-gw"), accept()))
			if f := h.found(Broken, Blocked); len(f) != 0 {
				t.Errorf("found %+v after the remedy", f)
			}
			if got := say(t, guest, "tcp4", internet+":80", wait); got == "" {
				t.Error("the remedy doesn't help")
			}
		})
	}
}

// A policy of iptables-legacy is seen as well; to look for it makes no table.
func TestLegacy(t *testing.T) {
	h := newHost(t)
	h.up()
	if l, err := legacyTable("cube-gw"); err != nil || l != nil {
		t.Fatalf("%v, %v", l, err)
	}
	setLegacyPolicy(t, verdictAccept)
	if f := h.found(Blocked); len(f) != 0 {
		t.Errorf("found %+v", f)
	}
	setLegacyPolicy(t, verdictDrop)
	f := h.found(Blocked)
	if len(f) != 1 || !strings.Contains(f[0].Detail, "chain FORWARD of iptables-legacy's table filter (iptables) drops") ||
		!strings.Contains(f[0].Remedy, "iptables-legacy -I FORWARD -i cube-gw") {
		t.Errorf("found %+v", f)
	}
}

// setLegacyPolicy does what iptables-legacy -P FORWARD does: it reads the table, which makes it, and replaces it.
func setLegacyPolicy(t *testing.T, verdict int32) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	must(t, err)
	defer unix.Close(fd)
	info := make([]byte, sizeofInfo)
	copy(info, "filter")
	if err := getsockopt(fd, getInfo, info); err != nil {
		t.Skipf("SKIPPED: the kernel has no iptables-legacy: %v", err)
	}
	size := word(info[infoSize:])
	entries := make([]byte, sizeofHead+size)
	copy(entries, "filter")
	binary.NativeEndian.PutUint32(entries[entriesSize:], size)
	must(t, getsockopt(fd, getEntries, entries))
	entries = entries[sizeofHead:]
	policy := word(info[infoUnderflow+4*unix.NF_INET_FORWARD:])
	at := policy + uint32(half(entries[policy+entryTarget:])) + sizeofTarget
	binary.NativeEndian.PutUint32(entries[at:], uint32(verdict))

	// struct ipt_replace: what it has in common with struct ipt_getinfo, but for the order, then counters and entries.
	count := word(info[76:])
	counters := make([]byte, 16*count)
	replace := make([]byte, 0, 96+size)
	replace = append(replace, info[:36]...)   // name, hooks
	replace = append(replace, info[76:84]...) // number and size of entries
	replace = append(replace, info[36:76]...) // where hooks begin and end
	replace = binary.NativeEndian.AppendUint32(replace, count)
	var pin runtime.Pinner
	pin.Pin(&counters[0])
	defer pin.Unpin()
	replace = binary.NativeEndian.AppendUint64(replace, uint64(uintptr(unsafe.Pointer(&counters[0]))))
	replace = append(replace, entries...)
	must(t, unix.SetsockoptString(fd, unix.SOL_IP, getInfo, string(replace)))
}

// Tables of others that are made to be misread.
func FuzzLegacy(f *testing.F) {
	f.Add(make([]byte, 2*sizeofEntry), uint32(0))
	f.Fuzz(func(t *testing.T, entries []byte, policy uint32) {
		(&foreignTable{chains: map[string]bool{}}).read(entries, policy, "cube-gw")
	})
}
