// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// What a machine leaves to the host: to make checksums, and to cut segments.
#pragma once

#define SUM_TO_BE_MADE 3 // the kernel's CHECKSUM_PARTIAL

// What programs aren't told of a frame: where its checksum is to be made from, and where it is to be put. Both are what the
// machine said, so that it could have a part of the headers changed after they were looked at.
struct sk_buff___offload {
	__u8 ip_summed : 2;
	__u16 csum_start;  // from the buffer's begin
	__u16 csum_offset; // from there
	__u16 mac_header;  // from the buffer's begin
} __attribute__((preserve_access_index));

// sound_checksum tells whether the checksum, if it is yet to be made, is the transport header's.
static __always_inline bool sound_checksum(struct __sk_buff *skb, __u8 proto)
{
	const struct sk_buff___offload *k = (const void *)skb; // the context is the kernel's buffer
	__u16 start, offset, mac;

	if (BPF_CORE_READ_BITFIELD_PROBED(k, ip_summed) != SUM_TO_BE_MADE)
		return true;
	if (bpf_core_read(&start, sizeof(start), &k->csum_start) || bpf_core_read(&offset, sizeof(offset), &k->csum_offset) ||
	    bpf_core_read(&mac, sizeof(mac), &k->mac_header))
		return false;
	if ((__u16)(start - mac) != L4_OFF)
		return false;
	switch (proto) {
	case IPPROTO_TCP:
		return offset == __builtin_offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
		return offset == __builtin_offsetof(struct udphdr, check);
	}
	return false;
}

// bytes_out is how long a frame is that is to be cut into segments, of which each gets the headers.
static __always_inline __u64 bytes_out(const struct __sk_buff *skb)
{
	__u32 size = skb->gso_size;

	return size ? skb->len + skb->len / size * (L4_OFF + sizeof(struct tcphdr)) : skb->len;
}
