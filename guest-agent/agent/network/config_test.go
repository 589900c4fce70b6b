package network

import (
	"errors"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func sample() *api.Network {
	return &api.Network{
		Address: "169.254.68.6/30", Gateway: "169.254.68.5", GatewayMac: []byte{2, 0, 0, 0, 0, 1}, Mtu: 1400,
		Nameservers: []string{"169.254.68.5", "192.0.2.53"},
	}
}

func TestParse(t *testing.T) {
	if c, err := Parse(nil); c != nil || err != nil {
		t.Errorf("%v, %v", c, err)
	}
	c, err := Parse(sample())
	if err != nil || c.Address.String() != "169.254.68.6/30" || c.GatewayMAC.String() != "02:00:00:00:00:01" || c.MTU != 1400 {
		t.Errorf("%v, %v", c, err)
	}
	if got := string(resolvConf(c.Nameservers)); got != "nameserver 169.254.68.5\nnameserver 192.0.2.53\n" {
		t.Errorf("resolv.conf %q", got)
	}
	for words, spoil := range map[string]func(*api.Network){
		`"169.254.68.6" is no`:       func(n *api.Network) { n.Address = "169.254.68.6" },
		`"10.0.0.1/33" is no`:        func(n *api.Network) { n.Address = "10.0.0.1/33" },
		`"fd00::1/64" is no`:         func(n *api.Network) { n.Address = "fd00::1/64" },
		`"224.0.0.1/24" is no`:       func(n *api.Network) { n.Address = "224.0.0.1/24" },
		`"127.0.0.1/8" is no`:        func(n *api.Network) { n.Address = "127.0.0.1/8" },
		`"" is no IPv4 address of a`: func(n *api.Network) { n.Gateway = "" },
		`"169.254.68.6" is no IPv4`:  func(n *api.Network) { n.Gateway = "169.254.68.6" },
		`"0.0.0.0" is no`:            func(n *api.Network) { n.Gateway = "0.0.0.0" },
		`"255.255.255.255" is no`:    func(n *api.Network) { n.Gateway = "255.255.255.255" },
		`"01:00:00:00:00:01" is no`:  func(n *api.Network) { n.GatewayMac = []byte{1, 0, 0, 0, 0, 1} },
		`"00:00:00:00:00:00" is no`:  func(n *api.Network) { n.GatewayMac = make([]byte, 6) },
		`"" is no MAC`:               func(n *api.Network) { n.GatewayMac = nil },
		"575":                        func(n *api.Network) { n.Mtu = 575 },
		"65536":                      func(n *api.Network) { n.Mtu = 65536 },
		"4 name servers":             func(n *api.Network) { n.Nameservers = make([]string, 4) },
		`"::1" is no IPv4`:           func(n *api.Network) { n.Nameservers[1] = "::1" },
		`"a\nb" is no IPv4`:          func(n *api.Network) { n.Nameservers[0] = "a\nb" },
	} {
		n := sample()
		spoil(n)
		if _, err := Parse(n); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), words) {
			t.Errorf("%v: got %v, want %q", n, err, words)
		}
	}
}
