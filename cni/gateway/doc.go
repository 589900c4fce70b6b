// Package gateway is the kernel's side of the sandboxes' network: one device by which all their packets enter and leave the
// host's network, and what the host does with them there: routing, masquerade, guards, the ways to the DNS forwarder and the
// egress proxy. Which sandbox a packet is of and what it may do is the datapath's to decide, before, and to write into the
// packet's mark; the guards here hold by themselves where it doesn't, or isn't there.
//
//	tap → datapath → [gateway device] → prerouting: limit, redirect, tproxy → input guard → DNS forwarder, egress proxy
//	                                                                       → forward guard → masquerade → uplink
//	uplink → conntrack → route of the pool → forward guard → [gateway device] → datapath → tap
//
// Only packets of the gateway device and of the pool are touched: base chains have the policy accept, so that whatever else
// the host forwards goes on as it does. The one exception is a host that forwards nothing (ip_forward is 0): it gets to
// forward what is ours and nothing else, until Down.
//
// Everything happens in the network namespace of the calling thread, and needs CAP_NET_ADMIN there. The package must know
// nothing of machines, containers or policies.
package gateway
