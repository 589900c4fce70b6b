// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// The datapath between sandboxes and the host's network stack: who a frame is from, whether it may pass, and the rewrite
// between the guest's address and the host's. Routing, NAT to the outside and neighbours are the kernel's.
//
//	guest → tap_in  → gateway device, as if it came in there → routing, the host's rules, out
//	in → routing → gateway device → gw_out → tap, with a mark → tap_out → guest
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "headers.h"
#include "maps.h"
#include "meter.h"
#include "sandbox.h"
#include "parse.h"
#include "offload.h"
#include "flow.h"
#include "rewrite.h"
#include "reply.h"

static __always_inline __u32 check_from_guest(struct __sk_buff *skb, const struct sandbox *sb, struct packet *p)
{
	struct ethhdr *eth = (void *)(long)skb->data;
	void *end = (void *)(long)skb->data_end;
	struct iphdr *ip = (void *)(eth + 1);
	__u32 reason;

	if ((void *)(ip + 1) > end)
		return REASON_MALFORMED;
	if (!same_mac(eth->h_source, sb->guest_mac))
		return REASON_SOURCE_MAC;
	for (int i = 0; i < 6; i++)
		if (eth->h_dest[i] != gateway_mac[i])
			return REASON_TARGET_MAC;
	reason = parse_ip(skb, ip, p);
	if (reason)
		return reason;
	if (ip->saddr != sb->guest_ip)
		return REASON_SOURCE_IP;
	if (ip->frag_off & bpf_htons(IP_MORE | IP_OFFSET))
		return REASON_FRAGMENT;
	if (ip->ttl <= 1) // the host would answer, with an address of its own
		return REASON_TTL;
	reason = parse_transport(ip, end, sb->guest_ip, p);
	if (!reason && !sound_checksum(skb, ip->protocol))
		reason = REASON_MALFORMED;
	return reason;
}

static __always_inline __u32 charge_from_guest(struct __sk_buff *skb, const struct sandbox *sb, const struct packet *p)
{
	__u32 id = sb->id;
	struct meter *m = bpf_map_lookup_elem(&meters, &id);

	if (!m)
		return REASON_INTERNAL;
	if (p->echo && p->l4_length - sizeof(struct icmp) > echo_max_payload)
		return REASON_ECHO_SIZE;
	if (p->echo && !take(m, &m->echo, 1, echo_per_second, echo_burst_ns))
		return REASON_ECHO_RATE;
	if (!take(m, &m->tx, bytes_out(skb), sb->tx.per_second, sb->tx.burst_ns))
		return REASON_TX_RATE;
	return 0;
}

static __always_inline __u32 mark_of(struct decision d)
{
	switch (d.action) {
	case ACTION_PROXY:
		return mark_proxy;
	case ACTION_RESOLVER:
		return mark_resolver;
	}
	return mark_direct;
}

// tap_in is at a tap's ingress: frames from the guest.
SEC("tc")
int tap_in(struct __sk_buff *skb)
{
	struct decision d = {};
	struct sandbox sb = {};
	struct packet p = {};
	__u32 reason;

	if (!sandbox_of_tap(skb->ifindex, &sb))
		return drop(skb, 0, 0, REASON_NO_SANDBOX, &p);
	if (skb->vlan_present || skb->protocol == bpf_htons(ETH_P_8021Q) || skb->protocol == bpf_htons(ETH_P_8021AD))
		return drop(skb, sb.id, sb.epoch, REASON_VLAN, &p);
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return answer_arp(skb, &sb, &p);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return drop(skb, sb.id, sb.epoch, REASON_IPV6, &p);
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return drop(skb, sb.id, sb.epoch, REASON_ETHERTYPE, &p);

	reason = readable(skb) ? check_from_guest(skb, &sb, &p) : REASON_INTERNAL;
	if (!reason)
		reason = charge_from_guest(skb, &sb, &p);
	if (!reason)
		reason = from_guest(skb, &sb, &p, &d);
	if (reason == REASON_NO_FLOW && p.proto == IPPROTO_TCP && !p.icmp_error && !(p.tcp_flags & TCP_RST))
		return answer_reset(skb, &sb, &p);
	if (!reason && rewrite(skb, &p, true, sb.guest_ip, sb.host_ip))
		reason = REASON_INTERNAL;
	if (reason)
		return drop(skb, sb.id, sb.epoch, reason, &p);
	set_mark(skb, mark_of(d));
	count(skb, sb.id, REASON_TX);
	return bpf_redirect(gateway_ifindex, BPF_F_INGRESS);
}

// check_to_guest lets a packet's later fragments follow its first one, which has the ports; the host sends it first.
static __always_inline __u32 check_to_guest(struct __sk_buff *skb, const struct sandbox *sb, struct packet *p,
					    bool *has_l4)
{
	struct ethhdr *eth = (void *)(long)skb->data;
	void *end = (void *)(long)skb->data_end;
	struct iphdr *ip = (void *)(eth + 1);
	struct fragment_key key = {};
	__u64 now = bpf_ktime_get_ns();
	__u32 reason;
	bool more;

	if ((void *)(ip + 1) > end)
		return REASON_MALFORMED;
	reason = parse_ip(skb, ip, p);
	if (reason)
		return reason;
	key.remote_ip = ip->saddr;
	key.host_ip = ip->daddr;
	key.ip_id = ip->id;
	key.proto = ip->protocol;
	more = ip->frag_off & bpf_htons(IP_MORE);
	*has_l4 = !(ip->frag_off & bpf_htons(IP_OFFSET));
	if (!*has_l4)
		return bpf_map_lookup_elem(&fragments, &key) ? 0 : REASON_FRAGMENT;
	reason = parse_transport(ip, end, sb->host_ip, p);
	if (!reason)
		reason = to_guest(skb, sb, p);
	if (!reason && more)
		bpf_map_update_elem(&fragments, &key, &now, BPF_ANY);
	return reason;
}

// gw_out is at the gateway device's egress: packets for guests, from anywhere.
SEC("tc")
int gw_out(struct __sk_buff *skb)
{
	struct packet p = { .to_guest = 1 };
	struct sandbox sb = {};
	struct meter *m;
	bool has_l4 = true;
	__u8 macs[12];
	__u32 reason;
	void *data;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return drop(skb, 0, 0, skb->protocol == bpf_htons(ETH_P_IPV6) ? REASON_IPV6 : REASON_ETHERTYPE, &p);
	if (!readable(skb))
		return drop(skb, 0, 0, REASON_INTERNAL, &p);
	data = (void *)(long)skb->data;
	if (data + L4_OFF > (void *)(long)skb->data_end)
		return drop(skb, 0, 0, REASON_MALFORMED, &p);
	if (!sandbox_of_address(((struct iphdr *)(data + IP_OFF))->daddr, &sb))
		return drop(skb, 0, 0, REASON_NO_SANDBOX, &p);

	reason = check_to_guest(skb, &sb, &p, &has_l4);
	m = bpf_map_lookup_elem(&meters, &sb.id);
	if (!reason && m && !take(m, &m->rx, skb->len, sb.rx.per_second, sb.rx.burst_ns))
		reason = REASON_RX_RATE;
	__builtin_memcpy(macs, sb.guest_mac, 6);
	copy_gateway_mac(macs + 6);
	if (!reason && (rewrite(skb, &p, has_l4, sb.host_ip, sb.guest_ip) ||
			bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0)))
		reason = REASON_INTERNAL;
	if (reason)
		return drop(skb, sb.id, sb.epoch, reason, &p);
	set_mark(skb, mark_guest);
	count(skb, sb.id, REASON_RX);
	return bpf_redirect(sb.ifindex, 0);
}

// tap_out is at a tap's egress: only what the two programs above sent there.
SEC("tc")
int tap_out(struct __sk_buff *skb)
{
	struct packet p = { .to_guest = 1 };
	struct sandbox sb = {};

	if ((skb->mark & mark_mask) == mark_guest)
		return TC_ACT_UNSPEC; // the next program, if there is one
	if (!sandbox_of_tap(skb->ifindex, &sb))
		return drop(skb, 0, 0, REASON_NOT_OURS, &p);
	return drop(skb, sb.id, sb.epoch, REASON_NOT_OURS, &p);
}

// bpf2go makes Go types of what is named somewhere.
const enum action *unused_action __attribute__((unused));
const enum reason *unused_reason __attribute__((unused));
const struct event *unused_event __attribute__((unused));

char _license[] SEC("license") = "Dual BSD/GPL";
