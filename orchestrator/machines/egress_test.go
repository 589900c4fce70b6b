package machines

import (
	"encoding/json"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// TestSettings: both lists are the policy's, and where all is denied nothing else needs to be said of it.
func TestSettings(t *testing.T) {
	for _, c := range []struct {
		allow, deny []string
		want        string
	}{
		{nil, nil, `{"default":"allow"}`},
		{nil, []string{"0.0.0.0/0"}, `{"default":"deny"}`},
		{[]string{"1.1.1.1"}, []string{"10.0.0.0/8", "0.0.0.0/0", "8.8.8.8"}, `{"default":"deny","allow":[{"to":"1.1.1.1"}]}`},
		{[]string{"1.1.1.1/32"}, []string{"1.1.1.0/24"}, `{"default":"allow","allow":[{"to":"1.1.1.1/32"}],"deny":[{"to":"1.1.1.0/24"}]}`},
	} {
		s, err := Settings(lifecycle.Egress{AllowOut: c.allow, DenyOut: c.deny})
		if err != nil {
			t.Fatalf("%q, %q: %v", c.allow, c.deny, err)
		}
		got, err := json.Marshal(s.Policy)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != c.want {
			t.Errorf("%q, %q: %s, want %s", c.allow, c.deny, got, c.want)
		}
	}
	for _, e := range []lifecycle.Egress{{AllowOut: []string{"example.com"}}, {DenyOut: []string{"10.0.0.0/33"}}, {DenyOut: []string{""}}} {
		if s, err := Settings(e); err == nil {
			t.Errorf("%+v is %+v", e, s)
		}
	}
}
