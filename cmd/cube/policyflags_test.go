package main

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
)

func TestParseRule(t *testing.T) {
	for s, want := range map[string]policy.Rule{
		"1.2.3.4":                           {To: "1.2.3.4"},
		"1.2.3.0/24":                        {To: "1.2.3.0/24"},
		"1.2.3.4/icmp":                      {To: "1.2.3.4", Protocol: "icmp"},
		"1.2.3.0/24/udp":                    {To: "1.2.3.0/24", Protocol: "udp"},
		"1.2.3.4:443":                       {To: "1.2.3.4", Ports: []string{"443"}},
		"1.2.3.4:443/tcp":                   {To: "1.2.3.4", Ports: []string{"443"}, Protocol: "tcp"},
		"93.184.216.0/24:443,8000-8010/tcp": {To: "93.184.216.0/24", Ports: []string{"443", "8000-8010"}, Protocol: "tcp"},
		"0.0.0.0/0:25/tcp":                  {To: "0.0.0.0/0", Ports: []string{"25"}, Protocol: "tcp"},
	} {
		if got, err := parseRule(s); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", s, got, err)
		}
	}
}

// TestNetworkFlags: what run is told of the network, and what it refuses, by the entry's name.
func TestNetworkFlags(t *testing.T) {
	rule := func(a policy.Action, to string) policy.Rule { return policy.Rule{Action: a, To: to} }
	local := netip.MustParseAddr("127.0.0.1")
	for line, want := range map[string]*network.Settings{
		"--network none": nil,
		"--network cube": {Policy: &policy.Policy{Default: policy.Direct}},
		"-i":             {Policy: &policy.Policy{Default: policy.Direct}},
		"--no-internet":  {Policy: &policy.Policy{}},
		"--no-internet --allow 1.2.3.4 --allow 2.0.0.0/8": {Policy: &policy.Policy{Rules: []policy.Rule{rule(policy.Direct, "1.2.3.4"), rule(policy.Direct, "2.0.0.0/8")}}},
		// Only a part of it can be had.
		"--no-internet --allow 10.0.0.0/7": {Policy: &policy.Policy{Rules: []policy.Rule{rule(policy.Direct, "10.0.0.0/7")}}},
		"--deny 1.0.0.0/8 --allow 1.2.3.4": {Policy: &policy.Policy{Default: policy.Direct, Rules: []policy.Rule{rule(policy.Direct, "1.2.3.4"), rule(policy.Deny, "1.0.0.0/8")}}},
		"-p 8080:80 -p 0.0.0.0:53:5353/udp -p 10.1.1.1:443:443/tcp": {Policy: &policy.Policy{Default: policy.Direct}, Ports: []network.Port{
			{HostIP: local, HostPort: 8080, ContainerPort: 80, Protocol: "tcp"},
			{HostIP: netip.IPv4Unspecified(), HostPort: 53, ContainerPort: 5353, Protocol: "udp"},
			{HostIP: netip.MustParseAddr("10.1.1.1"), HostPort: 443, ContainerPort: 443, Protocol: "tcp"},
		}},
	} {
		if got := parse(t, line+" img").Network; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, not %+v", line, got, want)
		}
	}
	for _, tc := range []struct{ line, says string }{
		{"--network host", `--network "host"`},
		{"--network none --no-internet", "--no-internet goes without"},
		{"--network none --allow 1.2.3.4", "--allow goes without"},
		{"--network none --deny 1.2.3.4", "--deny goes without"},
		{"--network none -p 80:80", "--publish goes without"},
		{"--allow 1.2.3.4", "add --no-internet"},
		{"--no-internet --deny 1.2.3.4", "no effect"},
		{"--no-internet --allow 10.1.2.3:5432/tcp", "network.openings"},
		{"--no-internet --allow 1.2.3.4 --allow 192.168.0.0/16", "--allow 192.168.0.0/16: no policy opens"},
		{"--deny example.com", "--deny example.com: "},
		{"--deny 1.2.3.4 --deny 1.2.3.4/8", "--deny 1.2.3.4/8: "},
		{"--deny 1.2.3.4/33", "--deny 1.2.3.4/33: "},
		{"--deny 1.2.3.4/", "no protocol"},
		{"--deny 1.2.3.4:", `port ""`},
		{"--deny 1.2.3.4:0", `port "0"`},
		{"--deny 1.2.3.4:80-", `port "80-"`},
		{"--deny 1.2.3.4:90-80", `port "90-80"`},
		{"--deny 1.2.3.4:80,", `port ""`},
		{"--deny 1.2.3.4:http", `port "http"`},
		{"--deny 1.2.3.4/tcp:80", "after the ports"},
		{"--deny 1.2.3.4:80/24", `protocol "24"`},
		{"--deny 1.2.3.4:80/sctp", `protocol "sctp"`},
		{"--deny 1.2.3.4:8/icmp", "icmp has no ports"},
		{"--deny 2001:db8::/32", "IPv6"},
		{"--deny :80", `(deny "" ports 80)`},
		{"-p 80", `"80"`},
		{"-p 0:80", `port "0"`},
		{"-p 80:65536", `port "65536"`},
		{"-p 80:http", `port "http"`},
		{"-p 80:80:80", "IPv4 address"},
		{"-p [::1]:80:80", "takes a port of the host and one"},
		{"-p localhost:80:80", `"localhost" is not an IPv4 address`},
		{"-p 80:80/icmp", `protocol "icmp"`},
		{"-p 80:80/", `protocol ""`},
		{"-p 80:80 -p 0.0.0.0:80:81", "mapping 2"},
		{"-p 224.0.0.1:80:80", "mapping 1"},
	} {
		configure(t)
		code, msg := cube(t, append([]string{"run"}, strings.Fields(tc.line+" img")...)...)
		if code != codeFailed || strings.Count(msg, "\n") != 1 || !strings.Contains(msg, tc.says) {
			t.Errorf("%s: code %d, %q doesn't say %q", tc.line, code, msg, tc.says)
		}
	}
}
