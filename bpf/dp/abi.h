// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// What the programs and user space share. Addresses and ports are in network order where their type says so, everything
// else in host order. IPv6 has room in the sandbox and in events; its flows and policy rows get maps of their own.
#pragma once

// A sandbox's id is its index in the arrays of sandboxes, meters and counters. Id 0 stands for frames of no sandbox.
#define MAX_SANDBOXES 4096
#define MAX_REASONS 64
#define MAX_RANGES 16

// What a verdict says of a packet.
enum action {
	ACTION_DENY,
	ACTION_DIRECT,
	ACTION_PROXY,
	ACTION_HARD_DENY,
	ACTION_RESOLVER,
};

// Why a frame was let through or dropped: the index of the counters. Values are never reused.
enum reason {
	REASON_TX,             // from the sandbox, on its way
	REASON_RX,             // to the sandbox, on its way
	REASON_ARP_REPLY,      // an ARP request for the gateway, answered
	REASON_RESET,          // a TCP segment of no flow, answered with a reset
	REASON_NO_SANDBOX,     // the tap or the address has no sandbox
	REASON_VLAN,           // a VLAN tag
	REASON_ETHERTYPE,      // neither IPv4 nor ARP
	REASON_IPV6,           // IPv6
	REASON_ARP,            // any ARP but a sound request for the gateway
	REASON_SOURCE_MAC,     // a source MAC that isn't the sandbox's
	REASON_SOURCE_IP,      // a source address that isn't the sandbox's
	REASON_TARGET_MAC,     // a target MAC that isn't the gateway's
	REASON_MALFORMED,      // lengths or flags that don't fit
	REASON_IP_OPTIONS,     // IP options
	REASON_FRAGMENT,       // a fragment from the sandbox, or one to it whose beginning wasn't let through
	REASON_TTL,            // a time to live that ends at the host
	REASON_PROTOCOL,       // neither TCP, UDP nor ICMP
	REASON_ICMP_TYPE,      // neither an echo nor an error about a flow
	REASON_ECHO_SIZE,      // an echo request with too much in it
	REASON_ECHO_RATE,      // too many echo requests
	REASON_POLICY,         // denied by the policy, or there is none
	REASON_HARD_DENY,      // an address that no policy opens
	REASON_NO_FLOW,        // an answer that nothing was asked for
	REASON_FLOW_QUOTA,     // too many flows
	REASON_FLOW_RATE,      // too many flows opened in a short time
	REASON_FLOW_TABLE,     // the table of flows is full
	REASON_TX_RATE,        // too many bytes from the sandbox
	REASON_RX_RATE,        // too many bytes to the sandbox
	REASON_NOT_OURS,       // for the tap, but not from our programs
	REASON_INTERNAL,       // a helper failed
};

// A token bucket: per_second tokens flow in, and so many fit that it takes burst_ns to fill it. 0 per second: no limit.
struct rate {
	__u64 per_second;
	__u64 burst_ns;
};

#define SANDBOX_RESOLVER 1u // its port 53, wherever to, is for the host's resolver

// A sandbox as user space sets it, in one go. An epoch and a generation are never used twice, not even by two sandboxes.
struct sandbox {
	struct bpf_spin_lock lock;
	__u32 ifindex; // of its tap; 0: the place is free
	__u32 id;
	__u32 epoch;
	__u32 gen; // the generation of its policy; 0: none, all is denied
	__be32 guest_ip;
	__be32 host_ip; // what the host knows it by
	__u8 guest_mac[6];
	__u16 flags;
	__u32 max_flows;
	struct rate flows; // that it opens
	struct rate tx;    // bytes from it
	struct rate rx;    // bytes to it
	__u8 ipv6[32];     // for its two IPv6 addresses
};

// A policy row is looked up by generation and address; its prefix length counts the 32 bits of the generation.
struct policy_key {
	__u32 prefixlen;
	__u32 gen;
	__be32 ip;
};

struct range {
	__u16 lo, hi; // ports; 0 to 0 for ICMP
	__u8 proto;
	__u8 action;
	__u16 rule;
};

// The whole verdict on an address: that of the range a packet is in, otherwise the first one. Ranges are disjoint.
struct verdict {
	__u16 rule;
	__u8 action;
	__u8 ranges;
	struct range range[MAX_RANGES];
};

struct flow_key {
	__u32 id;
	__u32 epoch;
	__be32 remote_ip;
	__be16 guest_port; // an echo's identifier
	__be16 remote_port;
	__u8 proto;
	__u8 pad[3];
};

#define FLOW_OUT 0 // opened by the sandbox
#define FLOW_IN 1  // opened by the host

// What was decided on a flow, in one word, so that it is never seen half written. gen is the policy's generation, for
// flows that the host opened the sandbox's epoch: no decision of another sandbox holds, nor one of an older policy.
struct decision {
	__u32 gen;
	__u16 rule;
	__u8 action;
	__u8 dir;
} __attribute__((aligned(8)));

#define FLOW_SEEN_TX 1u
#define FLOW_SEEN_RX 2u
#define FLOW_FIN_TX 4u
#define FLOW_FIN_RX 8u
#define FLOW_RST 16u

struct flow {
	__u64 last; // CLOCK_MONOTONIC
	__u64 tx_packets, tx_bytes, rx_packets, rx_bytes;
	struct decision decision;
	__u32 state;
	__u32 pad;
};

// What a sandbox has used up, written by the programs. Flows in the table are those opened less those user space closed.
// Each bucket holds the time at which it will be full again.
struct meter {
	struct bpf_spin_lock lock;
	__u32 opened;
	__u64 flows, tx, rx, echo, events;
};

struct counter {
	__u64 packets;
	__u64 bytes;
};

// All of a sandbox in one element: the kernel allocates each apart, and user space reads them at once.
struct counters {
	struct counter of[MAX_REASONS];
};

// The beginning of a fragmented packet that was let through to a sandbox.
struct fragment_key {
	__be32 remote_ip;
	__be32 host_ip;
	__be16 ip_id;
	__u8 proto;
	__u8 pad;
};

struct event {
	__u64 time; // CLOCK_MONOTONIC
	__u32 id;
	__u32 epoch;
	__u32 ifindex;
	__u32 length;
	__u8 remote_ip[16]; // IPv4 in the first four
	__be16 guest_port;
	__be16 remote_port;
	__u16 rule;
	__u8 reason;
	__u8 proto;
	__u8 to_guest;
	__u8 pad[7];
};
