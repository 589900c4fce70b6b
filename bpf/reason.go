package bpf

import "fmt"

// Reason is why a frame was let through, answered or dropped.
type Reason uint8

// The reasons, as dp/abi.h explains them.
const (
	TX        = Reason(dpReasonREASON_TX)
	RX        = Reason(dpReasonREASON_RX)
	ARPReply  = Reason(dpReasonREASON_ARP_REPLY)
	Reset     = Reason(dpReasonREASON_RESET)
	NoSandbox = Reason(dpReasonREASON_NO_SANDBOX)
	VLAN      = Reason(dpReasonREASON_VLAN)
	EtherType = Reason(dpReasonREASON_ETHERTYPE)
	IPv6      = Reason(dpReasonREASON_IPV6)
	ARP       = Reason(dpReasonREASON_ARP)
	SourceMAC = Reason(dpReasonREASON_SOURCE_MAC)
	SourceIP  = Reason(dpReasonREASON_SOURCE_IP)
	TargetMAC = Reason(dpReasonREASON_TARGET_MAC)
	Malformed = Reason(dpReasonREASON_MALFORMED)
	IPOptions = Reason(dpReasonREASON_IP_OPTIONS)
	Fragment  = Reason(dpReasonREASON_FRAGMENT)
	TTL       = Reason(dpReasonREASON_TTL)
	Protocol  = Reason(dpReasonREASON_PROTOCOL)
	ICMPType  = Reason(dpReasonREASON_ICMP_TYPE)
	EchoSize  = Reason(dpReasonREASON_ECHO_SIZE)
	EchoRate  = Reason(dpReasonREASON_ECHO_RATE)
	Policy    = Reason(dpReasonREASON_POLICY)
	HardDeny  = Reason(dpReasonREASON_HARD_DENY)
	NoFlow    = Reason(dpReasonREASON_NO_FLOW)
	FlowQuota = Reason(dpReasonREASON_FLOW_QUOTA)
	FlowRate  = Reason(dpReasonREASON_FLOW_RATE)
	FlowTable = Reason(dpReasonREASON_FLOW_TABLE)
	TXRate    = Reason(dpReasonREASON_TX_RATE)
	RXRate    = Reason(dpReasonREASON_RX_RATE)
	NotOurs   = Reason(dpReasonREASON_NOT_OURS)
	Internal  = Reason(dpReasonREASON_INTERNAL)
)

var reasons = [...]string{
	TX: "tx", RX: "rx", ARPReply: "arp-reply", Reset: "reset", NoSandbox: "no-sandbox", VLAN: "vlan",
	EtherType: "ethertype", IPv6: "ipv6", ARP: "arp", SourceMAC: "source-mac", SourceIP: "source-ip",
	TargetMAC: "target-mac", Malformed: "malformed", IPOptions: "ip-options", Fragment: "fragment", TTL: "ttl",
	Protocol: "protocol", ICMPType: "icmp-type", EchoSize: "echo-size", EchoRate: "echo-rate", Policy: "policy",
	HardDeny: "hard-deny", NoFlow: "no-flow", FlowQuota: "flow-quota", FlowRate: "flow-rate", FlowTable: "flow-table",
	TXRate: "tx-rate", RXRate: "rx-rate", NotOurs: "not-ours", Internal: "internal",
}

func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return fmt.Sprintf("reason-%d", uint8(r))
}

// Dropped tells whether the frame went nowhere.
func (r Reason) Dropped() bool { return r > Reset }
