package gateway

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Offsets in headers, RFC 791 §3.1, RFC 793 §3.1 and RFC 768.
const (
	ipSource, ipTarget = 12, 16
	targetPort         = 2
)

// A rule is made of matches, which all have to match, and what is done then.
type rule []expr.Any

func rules(parts ...[]expr.Any) (r rule) {
	for _, p := range parts {
		r = append(r, p...)
	}
	return r
}

func equal(data []byte) *expr.Cmp     { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }
func different(data []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data} }

func meta(key expr.MetaKey) *expr.Meta { return &expr.Meta{Key: key, Register: 1} }

// device is a device's name as rules compare it.
func device(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func from(dev string) []expr.Any { return []expr.Any{meta(expr.MetaKeyIIFNAME), equal(device(dev))} }
func notFrom(dev string) []expr.Any {
	return []expr.Any{meta(expr.MetaKeyIIFNAME), different(device(dev))}
}
func to(dev string) []expr.Any { return []expr.Any{meta(expr.MetaKeyOIFNAME), equal(device(dev))} }
func notTo(dev string) []expr.Any {
	return []expr.Any{meta(expr.MetaKeyOIFNAME), different(device(dev))}
}

func ipv4() []expr.Any {
	return []expr.Any{meta(expr.MetaKeyNFPROTO), equal([]byte{unix.NFPROTO_IPV4})}
}

func notIPv4() []expr.Any {
	return []expr.Any{meta(expr.MetaKeyNFPROTO), different([]byte{unix.NFPROTO_IPV4})}
}

func protocol(p byte) []expr.Any { return []expr.Any{meta(expr.MetaKeyL4PROTO), equal([]byte{p})} }

func masked(mask []byte) *expr.Bitwise {
	return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))}
}

func marked(value, mask uint32) []expr.Any {
	return []expr.Any{meta(expr.MetaKeyMARK), masked(binaryutil.NativeEndian.PutUint32(mask)), equal(binaryutil.NativeEndian.PutUint32(value))}
}

func notMarked(value, mask uint32) []expr.Any {
	return []expr.Any{meta(expr.MetaKeyMARK), masked(binaryutil.NativeEndian.PutUint32(mask)), different(binaryutil.NativeEndian.PutUint32(value))}
}

// state matches connections in any of the states, expr.CtStateBit….
func state(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		masked(binaryutil.NativeEndian.PutUint32(bits)),
		different(make([]byte, 4)),
	}
}

// confirmed is the status bit of connections that are in the kernel's table, linux/netfilter/nf_conntrack_common.h.
const confirmed = 1 << 3

// first matches a connection's first packet. One that isn't answered stays new, whatever comes.
func first() []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		masked(binaryutil.NativeEndian.PutUint32(confirmed)),
		equal(make([]byte, 4)),
	}
}

func address(offset uint32) *expr.Payload {
	return &expr.Payload{Base: expr.PayloadBaseNetworkHeader, DestRegister: 1, Offset: offset, Len: 4}
}

// Addresses and ports are in packets that were matched to be IPv4, and TCP or UDP, before.

func within(offset uint32, p netip.Prefix) []expr.Any {
	return []expr.Any{address(offset), masked(netmask(p)), equal(p.Addr().AsSlice())}
}

func outside(offset uint32, p netip.Prefix) []expr.Any {
	return []expr.Any{address(offset), masked(netmask(p)), different(p.Addr().AsSlice())}
}

func netmask(p netip.Prefix) []byte {
	return binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-p.Bits()))
}

func toPort(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, DestRegister: 1, Offset: targetPort, Len: 2},
		equal(binary.BigEndian.AppendUint16(nil, port)),
	}
}

// transparent matches what is for a socket that takes connections to any address, as the proxy's does.
func transparent() []expr.Any {
	return []expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1}, equal([]byte{1})}
}

// moreThan matches new connections of an address that has that many already. They are counted in the set.
func moreThan(n uint32, set string) []expr.Any {
	return []expr.Any{address(ipSource), &expr.Dynset{
		SrcRegKey: 1, SetName: set, Operation: unix.NFT_DYNSET_OP_ADD,
		Exprs: []expr.Any{&expr.Connlimit{Count: n, Flags: expr.NFT_CONNLIMIT_F_INV}},
	}}
}

func drop() []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func masquerade() []expr.Any { return []expr.Any{&expr.Masq{FullyRandom: true}} }

// redirect sends to a port of the address of the device by which the packet came.
func redirect(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.Redir{RegisterProtoMin: 1},
	}
}

// tproxy gives to the socket at the address, and leaves the packet as it is. Where there is no such socket the rest of the
// rule isn't run.
func tproxy(to netip.AddrPort) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
		&expr.TProxy{Family: unix.NFPROTO_IPV4, TableFamily: unix.NFPROTO_INET, RegAddr: 1, RegPort: 2},
	}
}
