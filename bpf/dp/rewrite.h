// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// The rewrite between the address that the guest has, which is every guest's, and the one that the host knows it by.
// Checksums are changed by helpers only: the sums of many frames are yet to be made, by the host or a device.
#pragma once

#define FIELD(base, type, name) ((base) + __builtin_offsetof(struct type, name))

// rewrite_quoted does it in what an ICMP error quotes: the other way round. The ICMP checksum stays as it is, as the
// address and the quoted header's own checksum change by the same.
static __always_inline long rewrite_quoted(struct __sk_buff *skb, bool to_guest, __be32 from, __be32 to)
{
	__u32 field = to_guest ? FIELD(INNER_OFF, iphdr, saddr) : FIELD(INNER_OFF, iphdr, daddr);

	return bpf_l3_csum_replace(skb, FIELD(INNER_OFF, iphdr, check), from, to, sizeof(to)) ?:
	       bpf_skb_store_bytes(skb, field, &to, sizeof(to), 0);
}

// rewrite changes the sandbox's address: the target to guests, the source from them. No pointer into the frame is valid
// after it. Only a packet's first fragment has a transport header.
static __always_inline long rewrite(struct __sk_buff *skb, const struct packet *p, bool has_l4, __be32 from, __be32 to)
{
	__u32 field = p->to_guest ? FIELD(IP_OFF, iphdr, daddr) : FIELD(IP_OFF, iphdr, saddr);
	long err = 0;

	if (p->icmp_error)
		err = rewrite_quoted(skb, p->to_guest, from, to);
	else if (has_l4 && p->proto == IPPROTO_TCP)
		err = bpf_l4_csum_replace(skb, FIELD(L4_OFF, tcphdr, check), from, to, BPF_F_PSEUDO_HDR | sizeof(to));
	else if (has_l4 && p->proto == IPPROTO_UDP)
		err = bpf_l4_csum_replace(skb, FIELD(L4_OFF, udphdr, check), from, to,
					  BPF_F_MARK_MANGLED_0 | BPF_F_PSEUDO_HDR | sizeof(to));
	return err ?: bpf_l3_csum_replace(skb, FIELD(IP_OFF, iphdr, check), from, to, sizeof(to)) ?:
		      bpf_skb_store_bytes(skb, field, &to, sizeof(to), 0);
}

static __always_inline void set_mark(struct __sk_buff *skb, __u32 mark)
{
	skb->mark = (skb->mark & ~mark_mask) | mark;
}

static __always_inline void copy_gateway_mac(__u8 *to)
{
	for (int i = 0; i < 6; i++)
		to[i] = gateway_mac[i];
}
