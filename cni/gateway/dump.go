package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/whole"
)

// dump asks the kernel for all nftables objects of a family (NFPROTO_…; NFPROTO_UNSPEC for all) by one of the requests
// NFT_MSG_GET…, in its own words: the nftables package can't read every rule that it can write, let alone other people's.
func dump(family byte, request int, attributes ...netlink.Attribute) ([]netlink.Message, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	defer c.Close()
	data, err := netlink.MarshalAttributes(attributes)
	if err != nil {
		return nil, fmt.Errorf("encode a request to nftables: %w", err)
	}
	for range whole.Attempts {
		messages, err := c.Execute(netlink.Message{
			Header: netlink.Header{
				Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | request),
				Flags: netlink.Request | netlink.Dump,
			},
			Data: append([]byte{family, unix.NFNETLINK_V0, 0, 0}, data...), // struct nfgenmsg
		})
		if err != nil {
			return nil, fmt.Errorf("list nftables: %w", err)
		}
		if !slices.ContainsFunc(messages, func(m netlink.Message) bool { return m.Header.Flags&netlink.DumpInterrupted != 0 }) {
			return messages, nil
		}
	}
	return nil, fmt.Errorf("list nftables: the rules change all the time: %w", errdefs.ErrUnavailable)
}

// attributes are those of one object. Nested ones are left as they are.
func attributes(m netlink.Message) (byte, map[uint16][]byte, error) {
	if len(m.Data) < 4 {
		return 0, nil, errors.New("nftables: a message without a header")
	}
	a, err := nested(m.Data[4:])
	return m.Data[0], a, err
}

func nested(b []byte) (map[uint16][]byte, error) {
	list, err := netlink.UnmarshalAttributes(b)
	if err != nil {
		return nil, fmt.Errorf("decode nftables: %w", err)
	}
	out := make(map[uint16][]byte, len(list))
	for _, a := range list {
		out[a.Type&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = a.Data
	}
	return out, nil
}

func text(b []byte) string { return unix.ByteSliceToString(b) }

// expression is a part of a rule as the kernel has it.
type expression struct {
	name string
	data []byte
}

func expressions(b []byte) ([]expression, error) {
	list, err := netlink.UnmarshalAttributes(b)
	if err != nil {
		return nil, fmt.Errorf("decode an nftables rule: %w", err)
	}
	var out []expression
	for _, e := range list {
		a, err := nested(e.Data)
		if err != nil {
			return nil, err
		}
		out = append(out, expression{text(a[unix.NFTA_EXPR_NAME]), a[unix.NFTA_EXPR_DATA]})
	}
	return out, nil
}

// inForce is a digest of a table of family inet as the kernel has it, of all that decides over packets; "" for no table.
func inForce(table string) (string, error) {
	h := sha256.New()
	found := false
	for _, kind := range []struct {
		request int
		table   uint16   // the attribute with the table's name
		matter  []uint16 // those that decide
	}{
		{unix.NFT_MSG_GETTABLE, unix.NFTA_TABLE_NAME, []uint16{unix.NFTA_TABLE_FLAGS}},
		{unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, []uint16{unix.NFTA_SET_NAME, unix.NFTA_SET_FLAGS, unix.NFTA_SET_KEY_TYPE, unix.NFTA_SET_KEY_LEN, unix.NFTA_SET_DESC}},
		{unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_TABLE, []uint16{unix.NFTA_CHAIN_NAME, unix.NFTA_CHAIN_HOOK, unix.NFTA_CHAIN_POLICY, unix.NFTA_CHAIN_TYPE}},
		{unix.NFT_MSG_GETRULE, unix.NFTA_RULE_TABLE, []uint16{unix.NFTA_RULE_CHAIN, unix.NFTA_RULE_EXPRESSIONS}},
	} {
		// Of others' rules there may be many. What else there is of a table that isn't there can't be asked for.
		var only []netlink.Attribute
		if kind.request == unix.NFT_MSG_GETRULE {
			only = append(only, netlink.Attribute{Type: unix.NFTA_RULE_TABLE, Data: append([]byte(table), 0)})
		}
		messages, err := dump(unix.NFPROTO_INET, kind.request, only...)
		if err != nil {
			return "", err
		}
		for _, m := range messages {
			family, a, err := attributes(m)
			if err != nil {
				return "", err
			}
			if family != unix.NFPROTO_INET || text(a[kind.table]) != table {
				continue
			}
			found = true
			for _, n := range kind.matter {
				if err := digest(h, n, a[n], kind.request == unix.NFT_MSG_GETRULE && n == unix.NFTA_RULE_EXPRESSIONS); err != nil {
					return "", err
				}
			}
		}
	}
	if !found {
		return "", nil
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// digest adds an attribute to h. Of a rule's expressions, what they have counted doesn't matter.
func digest(h hash.Hash, kind uint16, data []byte, isRule bool) error {
	fmt.Fprintf(h, "%d %d\n", kind, len(data))
	if !isRule {
		h.Write(data)
		return nil
	}
	list, err := expressions(data)
	if err != nil {
		return err
	}
	for _, e := range list {
		fmt.Fprintf(h, "%s\n", e.name)
		if e.name != "counter" {
			h.Write(e.data)
		}
	}
	return nil
}
