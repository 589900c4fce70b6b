package network_test

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
)

// TestSettings: what is written is what is read, and what isn't known is refused.
func TestSettings(t *testing.T) {
	want := &network.Settings{
		Policy: &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{{Action: policy.Direct, To: "1.2.3.0/24", Ports: []string{"443"}, Protocol: "tcp"}}},
		TX:     bpf.Rate{PerSecond: 1 << 20, Burst: 1 << 18},
		Ports:  []network.Port{{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}},
	}
	b, err := json.Marshal(want)
	if text := `{"policy":{"default":"deny","allow":[{"to":"1.2.3.0/24","ports":["443"],"protocol":"tcp"}]},"tx":{"perSecond":1048576,"burst":262144},"ports":[{"hostIP":"127.0.0.1","hostPort":8080,"containerPort":80,"protocol":"tcp"}]}`; err != nil || string(b) != text {
		t.Errorf("%s, %v", b, err)
	}
	if got, err := network.ParseSettings(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for in, want := range map[string]string{
		``:                               "EOF",
		`some`:                           "invalid character",
		`[]`:                             "array",
		`{"polcy": {}}`:                  "polcy",
		`{"policy": {"default": "al"}}`:  `policy: default "al"`,
		`{"tx": {"rate": 1}}`:            "rate",
		`{"rx": {"perSecond": -1}}`:      "perSecond",
		`{"ports": [{"port": 1}]}`:       "port",
		`{"ports": [{"hostPort": 1.5}]}`: "hostPort",
		`{} {}`:                          "something after",
		`{"policy": {"default": "deny"}`: "EOF",
	} {
		if s, err := network.ParseSettings([]byte(in)); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", in, s, err)
		}
	}
}
