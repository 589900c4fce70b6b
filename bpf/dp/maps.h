// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// The maps, all of them pinned, and the constants that are set when the programs are loaded.
#pragma once

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SANDBOXES);
	__type(key, __u32);   // ifindex
	__type(value, __u32); // id
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} taps SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SANDBOXES);
	__type(key, __be32);  // host_ip
	__type(value, __u32); // id
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} addresses SEC(".maps");

// Arrays, as an element of a hash map may belong to another sandbox by the time that it is read.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SANDBOXES);
	__type(key, __u32);
	__type(value, struct sandbox);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} sandboxes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SANDBOXES);
	__type(key, __u32);
	__type(value, struct meter);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} meters SEC(".maps");

// How many flows of a sandbox user space took out of the table. Only user space writes it.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SANDBOXES);
	__type(key, __u32);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} closed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_SANDBOXES);
	__type(key, __u32);
	__type(value, struct counters);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct policy_key);
	__type(value, struct verdict);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} policy SEC(".maps");

// Not an LRU map: one sandbox's flows must not push out another's. The quotas bound it.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct fragment_key);
	__type(value, __u64); // when the first fragment passed
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} fragments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} events SEC(".maps");

// The last epoch or generation that was given out, at index 0. Only user space uses it.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} serial SEC(".maps");

const volatile __u32 gateway_ifindex;
const volatile __be32 gateway_ip; // as guests know it
const volatile __u8 gateway_mac[6];

// Marks: only the bits of the mask are ours.
const volatile __u32 mark_mask;
const volatile __u32 mark_direct;
const volatile __u32 mark_proxy;
const volatile __u32 mark_resolver;
const volatile __u32 mark_guest; // on its way to a tap

const volatile __u32 echo_max_payload;
const volatile __u64 echo_per_second;
const volatile __u64 echo_burst_ns;
const volatile __u64 events_per_second;
const volatile __u64 events_burst_ns;
