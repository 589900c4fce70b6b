// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// What the gateway answers itself: ARP requests for it, and TCP segments of no flow.
#pragma once

static __always_inline bool same_mac(const __u8 *a, const __u8 *b)
{
	for (int i = 0; i < 6; i++)
		if (a[i] != b[i])
			return false;
	return true;
}

// send_back sends the frame to the tap it came from.
static __always_inline int send_back(struct __sk_buff *skb)
{
	set_mark(skb, mark_guest);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int answer_arp(struct __sk_buff *skb, const struct sandbox *sb, const struct packet *p)
{
	struct ethhdr *eth;
	struct arp *arp;
	__be32 target;

	if (bpf_skb_pull_data(skb, sizeof(*eth) + sizeof(*arp)))
		return drop(skb, sb->id, sb->epoch, REASON_MALFORMED, p);
	eth = (void *)(long)skb->data;
	arp = (void *)(eth + 1);
	if ((void *)(arp + 1) > (void *)(long)skb->data_end)
		return drop(skb, sb->id, sb->epoch, REASON_MALFORMED, p);
	if (!same_mac(eth->h_source, sb->guest_mac))
		return drop(skb, sb->id, sb->epoch, REASON_SOURCE_MAC, p);
	__builtin_memcpy(&target, arp->target_ip, sizeof(target));
	if (arp->hardware != bpf_htons(1) || arp->protocol != bpf_htons(ETH_P_IP) || arp->hardware_length != 6 ||
	    arp->protocol_length != 4 || arp->operation != bpf_htons(ARP_REQUEST) || target != gateway_ip ||
	    !same_mac(arp->sender_mac, sb->guest_mac) ||
	    __builtin_memcmp(arp->sender_ip, &sb->guest_ip, sizeof(sb->guest_ip)))
		return drop(skb, sb->id, sb->epoch, REASON_ARP, p);

	arp->operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(arp->target_mac, sb->guest_mac, sizeof(arp->target_mac));
	__builtin_memcpy(arp->target_ip, &sb->guest_ip, sizeof(arp->target_ip));
	copy_gateway_mac(arp->sender_mac);
	__builtin_memcpy(arp->sender_ip, &target, sizeof(target));
	__builtin_memcpy(eth->h_dest, sb->guest_mac, sizeof(eth->h_dest));
	copy_gateway_mac(eth->h_source);
	count(skb, sb->id, REASON_ARP_REPLY);
	return send_back(skb);
}

struct reset {
	struct iphdr ip;
	struct tcphdr tcp;
};

struct pseudo {
	__be32 source, target;
	__u8 zero, proto;
	__be16 length;
};

// answer_reset turns a segment of a connection that isn't known into the reset that its sender gets (RFC 9293, 3.10.7.1),
// so that a guest which was cloned or resumed sees at once that its connections are gone.
static __always_inline int answer_reset(struct __sk_buff *skb, const struct sandbox *sb, const struct packet *p)
{
	struct reset r = {};
	struct pseudo pseudo = { .source = p->remote_ip, .target = sb->guest_ip, .proto = IPPROTO_TCP };
	__u32 check = FIELD(L4_OFF, tcphdr, check);
	__u8 macs[12];
	__u32 sum;
	long err;

	pseudo.length = bpf_htons(sizeof(r.tcp));
	r.ip.version = 4;
	r.ip.ihl = 5;
	r.ip.tot_len = bpf_htons(sizeof(r));
	r.ip.frag_off = bpf_htons(0x4000);
	r.ip.ttl = 64;
	r.ip.protocol = IPPROTO_TCP;
	r.ip.saddr = p->remote_ip;
	r.ip.daddr = sb->guest_ip;
	sum = bpf_csum_diff(0, 0, (__be32 *)&r.ip, sizeof(r.ip), 0);
	sum = (sum & 0xffff) + (sum >> 16);
	r.ip.check = ~((sum & 0xffff) + (sum >> 16));
	r.tcp.source = p->remote_port;
	r.tcp.dest = p->guest_port;
	r.tcp.doff = sizeof(r.tcp) / 4;
	r.tcp.rst = 1;
	if (p->tcp_flags & TCP_ACK) {
		r.tcp.seq = p->tcp_ack;
	} else {
		r.tcp.ack = 1;
		r.tcp.ack_seq = bpf_htonl(bpf_ntohl(p->tcp_seq) + p->tcp_payload + !!(p->tcp_flags & TCP_FIN));
	}
	__builtin_memcpy(macs, sb->guest_mac, 6);
	copy_gateway_mac(macs + 6);

	sum = bpf_csum_diff(0, 0, (__be32 *)&r.tcp, sizeof(r.tcp), 0);
	// If the device is to make the sum, the helpers leave just the pseudo header's in the field, which is zero before.
	err = bpf_skb_change_tail(skb, L4_OFF + sizeof(r.tcp), 0) ?:
	      bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0) ?:
	      bpf_skb_store_bytes(skb, IP_OFF, &r, sizeof(r), 0) ?:
	      bpf_l4_csum_replace(skb, check, 0, sum, 0) ?:
	      bpf_l4_csum_replace(skb, check, 0, bpf_csum_diff(0, 0, (__be32 *)&pseudo, sizeof(pseudo), 0),
				  BPF_F_PSEUDO_HDR);
	if (err)
		return drop(skb, sb->id, sb->epoch, REASON_INTERNAL, p);
	count(skb, sb->id, REASON_RESET);
	return send_back(skb);
}
