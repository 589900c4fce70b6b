package policy

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
)

// entry is a rule without what it says, which the list says that it is in.
type entry struct {
	To       string   `json:"to"`
	Ports    []string `json:"ports,omitempty"`
	Protocol string   `json:"protocol,omitempty"`
}

// MarshalJSON writes what UnmarshalJSON reads. It has no place for rules that proxy. Rules that deny come after those that
// allow when it is read again, and are numbered so.
func (p Policy) MarshalJSON() ([]byte, error) {
	var out struct {
		Default string  `json:"default"`
		Allow   []entry `json:"allow,omitempty"`
		Deny    []entry `json:"deny,omitempty"`
	}
	out.Default = p.Default.String()
	for i, r := range p.Rules {
		e := entry{To: r.To, Ports: r.Ports, Protocol: r.Protocol}
		switch r.Action {
		case Direct:
			out.Allow = append(out.Allow, e)
		case Deny:
			out.Deny = append(out.Deny, e)
		default:
			return nil, fmt.Errorf("rule %d (%s): only rules that allow or deny can be written: %w", i+1, r, errdefs.ErrInvalidArgument)
		}
	}
	return json.Marshal(out)
}

// UnmarshalJSON reads a policy, as configurations have it:
//
//	{"default": "deny", "allow": [{"to": "192.0.2.0/24", "ports": ["443", "8000-8010"], "protocol": "tcp"}], "deny": []}
//
// What it doesn't know, or what is there twice, it refuses, with errdefs.ErrInvalidArgument and the entry's name: a rule that
// is misspelt must not be one that isn't there. Whether addresses and ports are right is Compile's to say.
func (p *Policy) UnmarshalJSON(b []byte) error {
	var in struct {
		Default *string           `json:"default"`
		Allow   []json.RawMessage `json:"allow"`
		Deny    []json.RawMessage `json:"deny"`
	}
	if err := object(b, &in, "default", "allow", "deny"); err != nil {
		return fmt.Errorf("policy: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	if in.Default == nil {
		return fmt.Errorf("policy: default is missing: it is allow or deny: %w", errdefs.ErrInvalidArgument)
	}
	var read Policy
	if n := len(in.Allow) + len(in.Deny); n > 0 {
		read.Rules = make([]Rule, 0, n)
	}
	switch *in.Default {
	case Direct.String():
		read.Default = Direct
	case Deny.String():
		read.Default = Deny
	default:
		return fmt.Errorf("policy: default %q: it is allow or deny: %w", *in.Default, errdefs.ErrInvalidArgument)
	}
	for _, list := range []struct {
		says    Action
		entries []json.RawMessage
	}{{Direct, in.Allow}, {Deny, in.Deny}} {
		for i, raw := range list.entries {
			var e entry
			if err := object(raw, &e, "to", "ports", "protocol"); err != nil {
				return fmt.Errorf("policy: %s, entry %d: %w: %w", list.says, i+1, err, errdefs.ErrInvalidArgument)
			}
			read.Rules = append(read.Rules, Rule{Action: list.says, To: e.To, Ports: e.Ports, Protocol: e.Protocol})
		}
	}
	*p = read
	return nil
}
