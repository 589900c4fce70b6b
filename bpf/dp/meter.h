// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Counters, token buckets and drop events.
#pragma once

// What a packet does to a flow: nothing unless it is there, opens it if it isn't there, or begins it anew.
#define OPENS_NONE 0
#define OPENS_MISSING 1
#define OPENS_ANEW 2

// What a program knows of the frame in its hands.
struct packet {
	__be32 remote_ip;
	__be16 guest_port, remote_port;
	__u16 l4_length; // with the header of the transport
	__u16 rule;
	__u8 proto;
	__u8 tcp_flags;
	__u8 icmp_error; // it quotes a packet of the flow that the tuple names
	__u8 echo;       // an echo request
	__u8 opens;      // OPENS_…
	__u8 to_guest;
	__be32 tcp_seq, tcp_ack;
	__u16 tcp_payload;
};

static __always_inline void count(struct __sk_buff *skb, __u32 id, __u32 reason)
{
	struct counters *c = bpf_map_lookup_elem(&counters, &id);

	if (!c || reason >= MAX_REASONS)
		return;
	c->of[reason].packets++;
	c->of[reason].bytes += skb->len;
}

// take_locked takes tokens from a bucket whose lock the caller holds.
static __always_inline bool take_locked(__u64 *bucket, __u64 now, __u64 cost_ns, __u64 burst_ns)
{
	__u64 full = *bucket > now ? *bucket : now;

	if (full + cost_ns - now > burst_ns)
		return false;
	*bucket = full + cost_ns;
	return true;
}

static __always_inline bool take(struct meter *m, __u64 *bucket, __u64 tokens, __u64 per_second, __u64 burst_ns)
{
	__u64 now, cost;
	bool ok;

	if (!per_second)
		return true;
	now = bpf_ktime_get_ns();
	cost = tokens * 1000000000ull / per_second;
	bpf_spin_lock(&m->lock);
	ok = take_locked(bucket, now, cost, burst_ns);
	bpf_spin_unlock(&m->lock);
	return ok;
}

static __always_inline void report(struct __sk_buff *skb, __u32 id, __u32 epoch, __u32 reason, const struct packet *p)
{
	struct meter *m = bpf_map_lookup_elem(&meters, &id);
	struct event *e;

	if (!m || !take(m, &m->events, 1, events_per_second, events_burst_ns))
		return;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return;
	__builtin_memset(e, 0, sizeof(*e));
	e->time = bpf_ktime_get_ns();
	e->id = id;
	e->epoch = epoch;
	e->ifindex = skb->ifindex;
	e->length = skb->len;
	__builtin_memcpy(e->remote_ip, &p->remote_ip, sizeof(p->remote_ip));
	e->guest_port = p->guest_port;
	e->remote_port = p->remote_port;
	e->rule = p->rule;
	e->reason = reason;
	e->proto = p->proto;
	e->to_guest = p->to_guest;
	bpf_ringbuf_submit(e, 0);
}

static __always_inline int drop(struct __sk_buff *skb, __u32 id, __u32 epoch, __u32 reason, const struct packet *p)
{
	count(skb, id, reason);
	report(skb, id, epoch, reason, p);
	return TC_ACT_SHOT;
}
