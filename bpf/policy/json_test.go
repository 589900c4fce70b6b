package policy

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestJSON(t *testing.T) {
	for text, want := range map[string]Policy{
		`{"default":"allow"}`:                                                   {Default: Direct},
		`{"default":"deny","allow":null,"deny":[]}`:                             {},
		" { \"deny\" :\n[ ] ,\t\"allow\" : null , \"default\" : \"deny\" }\r\n": {},
		`{"default":"deny","allow":[{"to":"a\"},{\\","ports":["]}","\\\""],"protocol":"{"}]}`: {Rules: []Rule{
			{Action: Direct, To: `a"},{\`, Ports: []string{"]}", `\"`}, Protocol: "{"},
		}},
		`{"default":"deny","deny":[{"to":"1.2.0.0/16"}],"allow":[{"to":"1.0.0.0/8","ports":["443","8000-8010"],"protocol":"tcp"},{"to":"2.0.0.0/8"}]}`: {Rules: []Rule{
			{Action: Direct, To: "1.0.0.0/8", Ports: []string{"443", "8000-8010"}, Protocol: "tcp"},
			{Action: Direct, To: "2.0.0.0/8"},
			{Action: Deny, To: "1.2.0.0/16"},
		}},
	} {
		var got, again Policy
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, not %+v", text, got, want)
		}
		b, err := json.Marshal(got)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if err := json.Unmarshal(b, &again); err != nil || !reflect.DeepEqual(again, want) {
			t.Errorf("%s is written as %s, which reads as %+v (%v)", text, b, again, err)
		}
	}
}

func TestJSONRefusals(t *testing.T) {
	for _, tc := range []struct{ name, text, says string }{
		{"no default", `{"allow":[{"to":"1.0.0.0/8"}]}`, "default is missing"},
		{"null for a default", `{"default":null}`, "default is missing"},
		{"another default", `{"default":"proxy"}`, `default "proxy"`},
		{"a default that is no word", `{"default":true}`, "default:"},
		{"an unknown field", `{"default":"allow","denny":[]}`, `no field "denny"`},
		{"another case", `{"default":"allow","Deny":[]}`, `no field "Deny"`},
		{"a list twice", `{"default":"allow","deny":[{"to":"1.0.0.0/8"}],"deny":[]}`, "deny is there twice"},
		{"an unknown field of an entry", `{"default":"deny","allow":[{"to":"1.0.0.0/8"},{"to":"2.0.0.0/8","port":["1"]}]}`, `allow, entry 2: there is no field "port"`},
		{"a port that is a number", `{"default":"allow","deny":[{"to":"1.0.0.0/8","ports":[443]}]}`, "deny, entry 1: ports:"},
		{"an entry that is no object", `{"default":"allow","deny":["1.0.0.0/8"]}`, "deny, entry 1: it takes an object"},
		{"an address twice", `{"default":"deny","allow":[{"to":"1.0.0.0/8","to":"0.0.0.0/0"}]}`, "allow, entry 1: field to is there twice"},
		{"a name with an escape", `{"default":"allow","\u0064eny":[]}`, `no field "\\u0064eny"`},
		{"a number in the end", `{"default":"allow","deny":1}`, "deny: it can't be"},
		{"a word before more", `{"default":"allow","deny": true ,"allow":[]}`, "deny: it can't be"},
		{"an object in a list's place", `{"default":"allow","deny":{"a":[{}]},"allow":[]}`, "deny: it can't be"},
		{"a list", `[]`, "it takes an object"},
		{"null", `null`, "it takes an object"},
		{"a long name", `{"` + strings.Repeat("x", 1000) + `":1}`, "…"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := Policy{Default: Direct}
			err := json.Unmarshal([]byte(tc.text), &p)
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), tc.says) || len(err.Error()) > 300 {
				t.Errorf("error %v", err)
			}
			if !reflect.DeepEqual(p, Policy{Default: Direct}) {
				t.Errorf("of what was refused something is in force: %+v", p)
			}
		})
	}
	if b, err := json.Marshal(Policy{Rules: []Rule{{Action: Proxy, To: "1.0.0.0/8", Protocol: "tcp"}}}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("written as %s (%v)", b, err)
	}
}
