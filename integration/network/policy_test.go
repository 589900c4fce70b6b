package network

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/integration/testhost"
)

// TestPolicy: what may be reached is what the command line says, and then what the latest policy says.
func TestPolicy(t *testing.T) {
	nothingLeft(t)
	tcp := target{"tcp", testhost.Server, testhost.DataPort}
	udp := target{"udp", testhost.Server, testhost.EchoPort}
	other := target{"tcp", testhost.Narrow, testhost.DataPort}
	x := newBox(t, "policed", "--no-internet", "--allow", fmt.Sprintf("%s:%d/tcp", tcp.address, tcp.port))
	for _, tc := range []struct {
		name    string
		set     []string
		reaches []target
	}{
		{"allowed in part", nil, []target{tcp}},
		{"denied in part", []string{"--deny", testhost.Server.String() + "/udp"}, []target{tcp, other}},
		{"allowed beats denied", []string{"--deny", "93.184.0.0/16", "--allow", testhost.Narrow.String()}, []target{other}},
		{"all allowed", []string{"--default", "allow"}, []target{tcp, udp, other}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.set != nil {
				cube(t, append(append([]string{"network", "policy", "set"}, tc.set...), x.id)...)
			}
			want := fmt.Sprintln(tc.reaches)
			if got := x.reaches(t, tcp, udp, other); got != strings.Trim(want, "[]\n") {
				t.Errorf("it reaches %s, want %s", got, want)
			}
		})
	}
	if n := drops(t, x)[bpf.Policy].Packets; n < 5 {
		t.Errorf("%d packets were counted as against the policy", n)
	}
}
