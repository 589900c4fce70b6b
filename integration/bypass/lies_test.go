package bypass

import (
	"fmt"
	"net/netip"

	"github.com/cubesandbox/cube/bpf"
)

// lies are of the header before the frame, that tells the host what it need not do.
func lies() []vector {
	big := func(dst netip.Addr) []byte {
		return fromGuest(udp(at(guestIP, 4000), at(dst, 9999), string(make([]byte, 2800))))
	}
	stream := func(flags byte) []byte {
		return fromGuest(tcp(at(guestIP, 4000), at(bad, 80), flags, 1, 1, string(make([]byte, 2800))))
	}
	reset := result{bpf.Reset.String(), []string{"a: tcp rst bad:80 > guest"}}
	vectors := []vector{
		{name: "checksum beyond the frame", frames: one(guestUDP(ok, 9999)), header: vnet{flags: needsCsum, csumStart: 2000, csumOffset: 6}, want: refused},
		{name: "checksum's end beyond the frame", frames: one(guestUDP(ok, 9999)), header: vnet{flags: needsCsum, csumStart: l4, csumOffset: 2000}, want: refused},
		{name: "checksum within Ethernet's header", frames: one(guestUDP(ok, 9999)), header: vnet{flags: needsCsum, csumStart: 4, csumOffset: 2}, want: refused},
		{name: "header length beyond the frame", frames: one(guestUDP(ok, 9999)), header: vnet{headerLength: 3000, gso: gsoUDP, gsoSize: 1000}, want: refused},
		{name: "segments of nothing", frames: one(big(ok)), header: vnet{flags: needsCsum, gso: gsoUDPL4, csumStart: l4, csumOffset: 6}, want: refused},
		{name: "segments of no known kind", frames: one(big(ok)), header: vnet{gso: 0x77, gsoSize: 1000}, want: refused},
		{name: "UDP in segments to a denied address", frames: one(big(bad)), header: vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 1400, csumStart: l4, csumOffset: 6}, want: dropped(bpf.Policy), careless: &result{"tx", []string{"wire: udp uplink > bad:9999", "wire: udp uplink > bad:9999"}}},
		{name: "TCP in segments to a denied address", frames: one(stream(ack)), header: vnet{flags: needsCsum, gso: gsoTCP4, gsoSize: 1400, csumStart: l4, csumOffset: 16}, want: reset},
		{name: "UDP in segments to an allowed address", frames: one(big(ok)), header: vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 1400, csumStart: l4, csumOffset: 6}, want: passed("wire: udp uplink > ok:9999", "wire: udp uplink > ok:9999")},
		{name: "segments larger than the frame", frames: one(guestUDP(ok, 9999)), header: vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 60000, csumStart: l4, csumOffset: 6}, want: passed("wire: udp uplink > ok:9999")},
		{name: "UDP to be fragmented", frames: one(big(ok)), header: vnet{gso: gsoUDP, gsoSize: 1400}, want: passed("wire: udp uplink > ok:9999", "wire: fragment uplink > ok", "wire: fragment uplink > ok")},
		{name: "TCP segments of UDP", frames: one(big(ok)), header: vnet{flags: needsCsum, gso: gsoTCP4, gsoSize: 1400, csumStart: l4, csumOffset: 6}, want: refused},
		{name: "TCP segments of UDP, with TCP's checksum", frames: one(big(ok)), header: vnet{flags: needsCsum, gso: gsoTCP4, gsoSize: 1400, csumStart: l4, csumOffset: 16}, want: dropped(bpf.Malformed)},
		{name: "TCP segments of UDP, without a checksum", frames: one(big(ok)), header: vnet{gso: gsoTCP4 | gsoECN, gsoSize: 1400}, want: passed()},
		{name: "UDP segments of TCP", frames: one(stream(syn)), header: vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 1400, csumStart: l4, csumOffset: 6}, want: dropped(bpf.Malformed)},
		{name: "UDP segments of an echo", frames: one(guestEcho(ok, 100)), header: vnet{flags: needsCsum, gso: gsoUDPL4, gsoSize: 20, csumStart: l4, csumOffset: 6}, want: dropped(bpf.Malformed)},
		{name: "IPv6 segments of IPv4", frames: one(stream(ack)), header: vnet{flags: needsCsum, gso: gsoTCP6, gsoSize: 1400, csumStart: l4, csumOffset: 16}, want: refused},
	}
	// Who makes a checksum writes it where the header says: over what the datapath has looked at.
	for name, offset := range sorted(map[string]int{
		"TTL": ethLen + 8, "source address": ethLen + 12, "source address's end": ethLen + 14, "target address": ethLen + 16,
		"target address's end": ethLen + 18, "source port": l4, "target port": l4 + 2, "UDP length": l4 + 4,
	}) {
		start := ethLen + 6
		if offset >= l4 {
			start = l4
		}
		vectors = append(vectors, vector{
			name: fmt.Sprintf("checksum over the %s", name), frames: one(guestUDP(ok, 9999)),
			header: vnet{flags: needsCsum, csumStart: uint16(start), csumOffset: uint16(offset - start)}, want: dropped(bpf.Malformed),
		})
	}
	return vectors
}
