// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// From a frame to a packet. A frame that isn't sound in every length and flag has no packet.
#pragma once

// bad_flags tells of TCP flags that no connection has.
static __always_inline bool bad_flags(__u8 flags)
{
	if (flags & TCP_SYN)
		return flags & (TCP_FIN | TCP_RST);
	return !(flags & (TCP_ACK | TCP_RST));
}

// parse_quoted reads what an ICMP error is about: a packet that the sandbox got (to_guest: one that it sent).
static __always_inline __u32 parse_quoted(const struct iphdr *ip, const struct iphdr *quoted, void *end, __be32 ours,
					  struct packet *p)
{
	const __be16 *ports = (void *)(quoted + 1);

	if ((void *)quoted + sizeof(*quoted) + 8 > end || p->l4_length < sizeof(struct icmp) + sizeof(*quoted) + 8)
		return REASON_MALFORMED;
	if (quoted->version != 4 || quoted->ihl != 5 || quoted->frag_off & bpf_htons(IP_OFFSET))
		return REASON_MALFORMED;
	if (p->to_guest) {
		if (quoted->saddr != ours)
			return REASON_NO_FLOW;
		p->remote_ip = quoted->daddr;
	} else {
		// A packet that the sandbox got came from where the error goes to.
		if (quoted->daddr != ours || quoted->saddr != ip->daddr)
			return REASON_NO_FLOW;
		p->remote_ip = quoted->saddr;
	}
	p->proto = quoted->protocol;
	p->icmp_error = 1;
	switch (quoted->protocol) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
		p->guest_port = p->to_guest ? ports[0] : ports[1];
		p->remote_port = p->to_guest ? ports[1] : ports[0];
		return 0;
	case IPPROTO_ICMP:
		p->guest_port = ports[2];
		p->remote_port = 0;
		return 0;
	}
	return REASON_NO_FLOW;
}

static __always_inline __u32 parse_icmp(const struct iphdr *ip, const struct icmp *icmp, void *end, __be32 ours,
					struct packet *p)
{
	if ((void *)(icmp + 1) > end || p->l4_length < sizeof(*icmp))
		return REASON_MALFORMED;
	switch (icmp->type) {
	case ICMP_ECHO:
		if (icmp->code)
			return REASON_ICMP_TYPE;
		p->echo = 1;
		p->opens = OPENS_ANEW;
		// The host's own echo requests are told apart by their flow, which has its identifier as the remote port.
		if (p->to_guest)
			p->remote_port = icmp->id;
		else
			p->guest_port = icmp->id;
		return 0;
	case ICMP_ECHO_REPLY:
		if (icmp->code)
			return REASON_ICMP_TYPE;
		if (p->to_guest)
			p->guest_port = icmp->id;
		else
			p->remote_port = icmp->id;
		return 0;
	case ICMP_TIME_EXCEEDED:
	case ICMP_PARAMETER_PROBLEM:
		if (!p->to_guest)
			return REASON_ICMP_TYPE;
		// fall through
	case ICMP_UNREACHABLE:
		return parse_quoted(ip, (void *)(icmp + 1), end, ours, p);
	}
	return REASON_ICMP_TYPE;
}

// parse_transport reads the header after the IP header. ours is the sandbox's address as it stands in the frame.
static __always_inline __u32 parse_transport(const struct iphdr *ip, void *end, __be32 ours, struct packet *p)
{
	const void *l4 = ip + 1;

	switch (p->proto) {
	case IPPROTO_TCP: {
		const struct tcphdr *tcp = l4;
		__u16 header;

		if ((void *)(tcp + 1) > end || p->l4_length < sizeof(*tcp))
			return REASON_MALFORMED;
		header = tcp->doff * 4;
		p->tcp_flags = ((const __u8 *)tcp)[13];
		if (header < sizeof(*tcp) || header > p->l4_length || bad_flags(p->tcp_flags))
			return REASON_MALFORMED;
		p->guest_port = p->to_guest ? tcp->dest : tcp->source;
		p->remote_port = p->to_guest ? tcp->source : tcp->dest;
		p->tcp_seq = tcp->seq;
		p->tcp_ack = tcp->ack_seq;
		p->tcp_payload = p->l4_length - header;
		if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)
			p->opens = OPENS_ANEW;
		return 0;
	}
	case IPPROTO_UDP: {
		const struct udphdr *udp = l4;
		__u16 length;

		if ((void *)(udp + 1) > end || p->l4_length < sizeof(*udp))
			return REASON_MALFORMED;
		length = bpf_ntohs(udp->len);
		// The first of several fragments tells the length of all.
		if (length < sizeof(*udp) || (length > p->l4_length && !(ip->frag_off & bpf_htons(IP_MORE))))
			return REASON_MALFORMED;
		p->guest_port = p->to_guest ? udp->dest : udp->source;
		p->remote_port = p->to_guest ? udp->source : udp->dest;
		p->opens = OPENS_MISSING;
		return 0;
	}
	case IPPROTO_ICMP:
		return parse_icmp(ip, l4, end, ours, p);
	}
	return REASON_PROTOCOL;
}

// parse_ip checks the IP header's lengths, of a frame of which HEADERS bytes, or all that it has, can be read.
static __always_inline __u32 parse_ip(struct __sk_buff *skb, const struct iphdr *ip, struct packet *p)
{
	__u32 length = bpf_ntohs(ip->tot_len);

	if (ip->version != 4 || ip->ihl < 5)
		return REASON_MALFORMED;
	if (ip->ihl != 5)
		return REASON_IP_OPTIONS;
	// What follows the packet may only be what fills up the shortest frame.
	if (length < sizeof(*ip) || ETH_HLEN + length > skb->len ||
	    (ETH_HLEN + length < skb->len && skb->len > SHORTEST_FRAME))
		return REASON_MALFORMED;
	p->l4_length = length - sizeof(*ip);
	p->proto = ip->protocol;
	p->remote_ip = p->to_guest ? ip->saddr : ip->daddr;
	return 0;
}

// readable makes the headers of a frame readable at skb->data.
static __always_inline bool readable(struct __sk_buff *skb)
{
	return bpf_skb_pull_data(skb, skb->len < HEADERS ? skb->len : HEADERS) == 0;
}
