// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Who a tap or an address belongs to.
#pragma once

// read_sandbox copies a sandbox as it was set, whole. False: the place is free.
static __always_inline bool read_sandbox(__u32 id, struct sandbox *to)
{
	struct sandbox *sb = bpf_map_lookup_elem(&sandboxes, &id);

	if (!sb)
		return false;
	bpf_spin_lock(&sb->lock);
	to->ifindex = sb->ifindex;
	to->id = sb->id;
	to->epoch = sb->epoch;
	to->gen = sb->gen;
	to->guest_ip = sb->guest_ip;
	to->host_ip = sb->host_ip;
	__builtin_memcpy(to->guest_mac, sb->guest_mac, sizeof(to->guest_mac));
	to->flags = sb->flags;
	to->max_flows = sb->max_flows;
	to->flows = sb->flows;
	to->tx = sb->tx;
	to->rx = sb->rx;
	bpf_spin_unlock(&sb->lock);
	return to->ifindex != 0;
}

// The maps by ifindex and address may be a moment older or newer than the sandbox, so what they lead to is compared.
static __always_inline bool sandbox_of_tap(__u32 ifindex, struct sandbox *to)
{
	__u32 *id = bpf_map_lookup_elem(&taps, &ifindex);

	return id && read_sandbox(*id, to) && to->ifindex == ifindex;
}

static __always_inline bool sandbox_of_address(__be32 ip, struct sandbox *to)
{
	__u32 *id = bpf_map_lookup_elem(&addresses, &ip);

	return id && read_sandbox(*id, to) && to->host_ip == ip;
}
