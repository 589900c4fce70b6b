package gateway

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The tables of iptables-legacy aren't nftables' to show: linux/netfilter_ipv4/ip_tables.h.
const (
	getInfo, getEntries = 64, 65 // IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES

	sizeofInfo                                = 84 // struct ipt_getinfo
	infoUnderflow, infoSize                   = 56, 80
	sizeofEntry                               = 112 // struct ipt_entry
	entryIn, entryOut, entryTarget, entryNext = 16, 32, 88, 90
	sizeofTarget                              = 32 // struct xt_entry_target
	targetName, sizeofName                    = 2, 29
	verdictDrop, verdictAccept                = -nfDrop - 1, -nfAccept - 1
	sizeofHead                                = 40 // struct ipt_get_entries before the entries, which are aligned
	entriesSize                               = 32

	maxEntries = 64 << 20 // bytes
)

// legacyTable returns iptables-legacy's filter table, nil where there is none. It is looked for in the list of those in
// use first: to ask for its content makes one.
func legacyTable(dev string) (*foreignTable, error) {
	names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list iptables' tables: %w", err)
	}
	if !slices.Contains(strings.Fields(string(names)), "filter") {
		return nil, nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return nil, fmt.Errorf("ask for iptables' filter table: %w", err)
	}
	defer unix.Close(fd)
	info := make([]byte, sizeofInfo)
	copy(info, "filter")
	if err := getsockopt(fd, getInfo, info); err != nil {
		return nil, fmt.Errorf("ask for iptables' filter table: %w", err)
	}
	size := word(info[infoSize:])
	if size > maxEntries {
		return nil, fmt.Errorf("iptables' filter table has %d bytes: too much to look through", size)
	}
	entries := make([]byte, sizeofHead+size)
	copy(entries, "filter")
	binary.NativeEndian.PutUint32(entries[entriesSize:], size)
	if err := getsockopt(fd, getEntries, entries); err != nil {
		return nil, fmt.Errorf("read iptables' filter table: %w", err)
	}
	t := &foreignTable{family: unix.NFPROTO_IPV4, name: "filter", legacy: true, forward: []string{"FORWARD"}, chains: map[string]bool{"FORWARD": true}}
	t.read(entries[sizeofHead:], word(info[infoUnderflow+4*unix.NF_INET_FORWARD:]), dev)
	return t, nil
}

// read takes from the entries what matters: the policy, at offset policy, names of chains, and rules for the device.
func (t *foreignTable) read(entries []byte, policy uint32, dev string) {
	for at := uint32(0); at+sizeofEntry <= uint32(len(entries)); {
		e := entries[at:]
		target, next := half(e[entryTarget:]), half(e[entryNext:])
		if next < sizeofEntry || int(next) > len(e) || int(target)+sizeofTarget+4 > int(next) {
			return
		}
		name := text(e[target+targetName:][:sizeofName])
		switch verdict := int32(word(e[target+sizeofTarget:])); {
		case name == "ERROR": // the head of a chain
			t.chains[text(e[target+sizeofTarget:next])] = true
		case name == "" && at == policy && verdict == verdictDrop:
			t.drops = "FORWARD"
		case name == "" && verdict == verdictAccept:
			t.in = t.in || text(e[entryIn:][:unix.IFNAMSIZ]) == dev
			t.out = t.out || text(e[entryOut:][:unix.IFNAMSIZ]) == dev
		}
		at += uint32(next)
	}
}

func word(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }
func half(b []byte) uint16 { return binary.NativeEndian.Uint16(b) }

// getsockopt is the system call with a buffer that is read and written.
func getsockopt(fd, name int, b []byte) error {
	length := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(name),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
