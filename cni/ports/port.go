package ports

import (
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"github.com/containerd/errdefs"
)

// The protocols of ports.
const (
	TCP = "tcp"
	UDP = "udp"
)

// maxPorts is how many a sandbox can have.
const maxPorts = 128

// Port is one of the host's that leads to one of a sandbox's. The names are those of CNI's capability portMappings.
type Port struct {
	HostIP        netip.Addr `json:"hostIP"` // 0.0.0.0: all of the host's
	HostPort      uint16     `json:"hostPort"`
	ContainerPort uint16     `json:"containerPort"`
	Protocol      string     `json:"protocol"` // TCP or UDP
}

// String is the host's end: "127.0.0.1:8080/tcp".
func (p Port) String() string {
	return fmt.Sprintf("%s:%d/%s", p.HostIP, p.HostPort, p.Protocol)
}

// Overlaps tells whether what one takes of the host is the other's too.
func (p Port) Overlaps(o Port) bool {
	return p.HostPort == o.HostPort && p.Protocol == o.Protocol && (p.HostIP == o.HostIP || p.HostIP.IsUnspecified() || o.HostIP.IsUnspecified())
}

// Validate says what a sandbox can't have, errdefs.ErrInvalidArgument.
func Validate(all []Port) error {
	if len(all) > maxPorts {
		return fmt.Errorf("%d port mappings: a sandbox has at most %d: %w", len(all), maxPorts, errdefs.ErrInvalidArgument)
	}
	for i, p := range all {
		if why := p.wrong(); why != "" {
			return fmt.Errorf("port mapping %d (%s): %s: %w", i+1, p, why, errdefs.ErrInvalidArgument)
		}
		for k, o := range all[:i] {
			if p.Overlaps(o) {
				return fmt.Errorf("port mapping %d (%s): mapping %d (%s) has that port of the host: %w", i+1, p, k+1, o, errdefs.ErrInvalidArgument)
			}
		}
	}
	return nil
}

func (p Port) wrong() string {
	switch a := p.HostIP; {
	case p.Protocol != TCP && p.Protocol != UDP:
		return fmt.Sprintf("protocol %q: it is tcp or udp", p.Protocol)
	case !a.IsValid():
		return "hostIP is missing: 127.0.0.1 is for the host alone, 0.0.0.0 for all who reach it"
	case !a.Is4() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "hostIP is no IPv4 address that a host can have"
	case p.HostPort == 0 || p.ContainerPort == 0:
		return "hostPort and containerPort are between 1 and 65535"
	}
	return ""
}

// Target is where a sandbox's ports lead.
type Target struct {
	Address netip.Addr
	Leases  []Lease
}

// Close closes the leases' files.
func (t *Target) Close() {
	for _, l := range t.Leases {
		_ = l.File.Close()
	}
}

// Lease is a port with the file that says whose it is. The sandbox has the port, and its address, until the file is removed.
type Lease struct {
	Port
	File *os.File
}

// held tells whether the file is still there. Another one of the same name is another lease.
func (l Lease) held() bool {
	f, err := l.File.Stat()
	return err == nil && f.Sys().(*syscall.Stat_t).Nlink > 0
}
