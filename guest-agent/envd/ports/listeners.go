package ports

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// tables are the kernel's lists of TCP sockets. Those that listen come first.
var tables = []string{"/proc/net/tcp", "/proc/net/tcp6"}

// listening is the state of a socket that listens.
const listening = "0A"

// listeners returns the addresses that are listened on.
func listeners() ([]netip.AddrPort, error) {
	var all []netip.AddrPort
	for _, table := range tables {
		f, err := os.Open(table)
		if os.IsNotExist(err) { // a kernel without IPv6
			continue
		}
		if err != nil {
			return nil, err
		}
		all, err = parse(all, f)
		f.Close()
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// parse appends the addresses of a table's sockets that listen, up to the first that doesn't.
func parse(all []netip.AddrPort, table io.Reader) ([]netip.AddrPort, error) {
	s := bufio.NewScanner(table)
	s.Scan() // the heading
	for s.Scan() {
		// sl local_address rem_address st …
		f := strings.Fields(s.Text())
		if len(f) < 4 || f[3] != listening {
			break
		}
		if a, ok := parseAddress(f[1]); ok {
			all = append(all, a)
		}
	}
	return all, s.Err()
}

// parseAddress takes an address in hexadecimal, whose words of 32 bits are in the processor's order, and a port.
func parseAddress(s string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	n, portErr := strconv.ParseUint(port, 16, 16)
	if err != nil || portErr != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), ok
}
