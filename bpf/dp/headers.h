// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Headers of ARP and ICMP, as the kernel's own files of them need a C library, and where things are in a frame.
#pragma once

#define ARP_REQUEST 1
#define ARP_REPLY 2

struct arp {
	__be16 hardware, protocol;
	__u8 hardware_length, protocol_length;
	__be16 operation;
	__u8 sender_mac[6];
	__u8 sender_ip[4];
	__u8 target_mac[6];
	__u8 target_ip[4];
} __attribute__((packed));

#define ICMP_ECHO_REPLY 0
#define ICMP_UNREACHABLE 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12

struct icmp {
	__u8 type, code;
	__sum16 check;
	__be16 id, sequence; // of echoes
};

#define TCP_FIN 1u
#define TCP_SYN 2u
#define TCP_RST 4u
#define TCP_ACK 16u

#define IP_MORE 0x2000
#define IP_OFFSET 0x1fff

#define IP_OFF ETH_HLEN
#define L4_OFF (ETH_HLEN + sizeof(struct iphdr))
#define INNER_OFF (L4_OFF + sizeof(struct icmp))
// A frame with the longest headers that are looked at: an ICMP error with the beginning of what it is about.
#define HEADERS (INNER_OFF + sizeof(struct iphdr) + 8)
#define SHORTEST_FRAME 60
