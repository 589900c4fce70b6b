// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Flows: what a sandbox has open, and what the policy says of it.
#pragma once

static __always_inline void key_of(const struct sandbox *sb, const struct packet *p, struct flow_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->id = sb->id;
	key->epoch = sb->epoch;
	key->remote_ip = p->remote_ip;
	key->guest_port = p->guest_port;
	key->remote_port = p->remote_port;
	key->proto = p->proto;
}

static __always_inline struct decision decision_of(const struct flow *f)
{
	union {
		__u64 word;
		struct decision d;
	} u = { .word = *(const volatile __u64 *)&f->decision };

	return u.d;
}

static __always_inline void decide(struct flow *f, struct decision d)
{
	union {
		struct decision d;
		__u64 word;
	} u = { .d = d };

	*(volatile __u64 *)&f->decision = u.word;
}

// of_resolver tells packets to and from a port that the host's resolver answers at, whoever's it is.
static __always_inline bool of_resolver(const struct sandbox *sb, const struct packet *p)
{
	return sb->flags & SANDBOX_RESOLVER && p->remote_port == bpf_htons(53) &&
	       (p->proto == IPPROTO_UDP || p->proto == IPPROTO_TCP);
}

// classify asks the policy about a packet of a flow that the sandbox opens. Without a policy, or a row for the address, all is denied.
static __always_inline struct decision classify(const struct sandbox *sb, const struct packet *p)
{
	struct policy_key key = { .prefixlen = 64, .gen = sb->gen, .ip = p->remote_ip };
	struct decision d = { .gen = sb->gen, .action = ACTION_DENY, .dir = FLOW_OUT };
	__u16 port = bpf_ntohs(p->remote_port);
	struct verdict *v;

	if (!sb->gen)
		return d;
	if (of_resolver(sb, p)) {
		d.action = ACTION_RESOLVER;
		return d;
	}
	v = bpf_map_lookup_elem(&policy, &key);
	if (!v)
		return d;
	d.action = v->action;
	d.rule = v->rule;
	for (int i = 0; i < MAX_RANGES; i++) {
		const struct range *r = &v->range[i];

		if (i >= v->ranges)
			break;
		if (r->proto == p->proto && port >= r->lo && port <= r->hi) {
			d.action = r->action;
			d.rule = r->rule;
			break;
		}
	}
	return d;
}

// open_flow puts a flow into the table, if the sandbox may have one more. 0, or the reason why not.
static __always_inline __u32 open_flow(const struct sandbox *sb, const struct flow_key *key, struct decision d)
{
	__u64 now = bpf_ktime_get_ns(), cost = 0;
	__u32 id = sb->id, reason = 0;
	struct meter *m = bpf_map_lookup_elem(&meters, &id);
	__u32 *gone = bpf_map_lookup_elem(&closed, &id);
	struct flow f = { .last = now };
	__u32 less;
	long err;

	if (!m || !gone)
		return REASON_INTERNAL;
	if (sb->flows.per_second && d.dir == FLOW_OUT)
		cost = 1000000000ull / sb->flows.per_second;
	less = *(volatile __u32 *)gone;
	bpf_spin_lock(&m->lock);
	if (m->opened - less >= sb->max_flows)
		reason = REASON_FLOW_QUOTA;
	else if (cost && !take_locked(&m->flows, now, cost, sb->flows.burst_ns))
		reason = REASON_FLOW_RATE;
	else
		m->opened++;
	bpf_spin_unlock(&m->lock);
	if (reason)
		return reason;

	f.decision = d;
	err = bpf_map_update_elem(&flows, key, &f, BPF_NOEXIST);
	if (!err)
		return 0;
	bpf_spin_lock(&m->lock);
	m->opened--;
	bpf_spin_unlock(&m->lock);
	return err == -17 /* EEXIST: another processor was faster */ ? 0 : REASON_FLOW_TABLE;
}

// note adds a packet to its flow.
static __always_inline void note(struct __sk_buff *skb, struct flow *f, const struct packet *p)
{
	__u64 packets = skb->gso_segs ? skb->gso_segs : 1;
	__u32 seen = p->to_guest ? FLOW_SEEN_RX : FLOW_SEEN_TX;

	if (p->tcp_flags & TCP_FIN)
		seen |= p->to_guest ? FLOW_FIN_RX : FLOW_FIN_TX;
	if (p->tcp_flags & TCP_RST)
		seen |= FLOW_RST;
	if ((f->state & seen) != seen)
		__sync_fetch_and_or(&f->state, seen);
	f->last = bpf_ktime_get_ns();
	if (p->to_guest) {
		__sync_fetch_and_add(&f->rx_packets, packets);
		__sync_fetch_and_add(&f->rx_bytes, skb->len);
	} else {
		__sync_fetch_and_add(&f->tx_packets, packets);
		__sync_fetch_and_add(&f->tx_bytes, skb->len);
	}
}

static __always_inline __u32 refusal(struct decision d)
{
	switch (d.action) {
	case ACTION_DIRECT:
	case ACTION_PROXY:
	case ACTION_RESOLVER:
		return 0;
	case ACTION_HARD_DENY:
		return REASON_HARD_DENY;
	}
	return REASON_POLICY;
}

// from_guest finds or opens the flow of a packet from the sandbox, and what was decided on it. 0, or why it is dropped.
static __always_inline __u32 from_guest(struct __sk_buff *skb, const struct sandbox *sb, struct packet *p,
					struct decision *d)
{
	struct flow_key key;
	struct flow *f;
	__u32 reason;

	key_of(sb, p, &key);
	f = bpf_map_lookup_elem(&flows, &key);
	if (!f && p->opens == OPENS_NONE)
		return REASON_NO_FLOW;
	if (f)
		*d = decision_of(f);
	// The host's own flow: the sandbox may answer, whatever its policy, but not begin one of its own with the ports.
	if (f && d->dir == FLOW_IN && d->gen == sb->epoch && p->opens != OPENS_ANEW) {
		d->action = ACTION_DIRECT;
		goto pass;
	}
	if (!f || d->dir == FLOW_IN || d->gen != sb->gen) {
		*d = classify(sb, p);
		if (f)
			decide(f, *d);
	}
	p->rule = d->rule;
	reason = refusal(*d);
	if (reason)
		return reason;
	if (!f) {
		reason = open_flow(sb, &key, *d);
		if (reason)
			return reason;
		f = bpf_map_lookup_elem(&flows, &key);
		if (!f)
			return REASON_INTERNAL;
	} else if (p->opens == OPENS_ANEW) {
		f->state = 0;
	}
pass:
	if (!p->icmp_error)
		note(skb, f, p);
	return 0;
}

// to_guest finds the flow of a packet to the sandbox. Only the host itself opens one: a packet that came in by any device
// is an answer or nothing, as is the resolver's, which has the name server's address. What the policy denies by now isn't
// answered any more.
static __always_inline __u32 to_guest(struct __sk_buff *skb, const struct sandbox *sb, struct packet *p)
{
	struct decision in = { .gen = sb->epoch, .action = ACTION_DIRECT, .dir = FLOW_IN };
	bool local = skb->ingress_ifindex == 0;
	struct flow_key key;
	struct decision d;
	struct flow *f;
	__u32 reason;

	if (p->opens == OPENS_ANEW && !local)
		return REASON_NO_FLOW;
	key_of(sb, p, &key);
	f = bpf_map_lookup_elem(&flows, &key);
	if (!f) {
		if (p->opens == OPENS_NONE || !local || of_resolver(sb, p))
			return REASON_NO_FLOW;
		reason = open_flow(sb, &key, in);
		if (reason)
			return reason;
		f = bpf_map_lookup_elem(&flows, &key);
		if (!f)
			return REASON_INTERNAL;
	} else if (p->opens == OPENS_ANEW) {
		decide(f, in);
		f->state = 0;
	} else {
		d = decision_of(f);
		if (d.dir == FLOW_OUT && d.gen != sb->gen) {
			d = classify(sb, p);
			decide(f, d);
		}
		p->rule = d.rule;
		reason = refusal(d);
		if (reason)
			return reason;
	}
	if (!p->icmp_error)
		note(skb, f, p);
	return 0;
}
