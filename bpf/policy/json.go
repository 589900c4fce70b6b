package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"

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
	var byDefault *string
	var allow, deny []json.RawMessage
	if err := object(b, map[string]any{"default": &byDefault, "allow": &allow, "deny": &deny}); err != nil {
		return fmt.Errorf("policy: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	if byDefault == nil {
		return fmt.Errorf("policy: default is missing: it is allow or deny: %w", errdefs.ErrInvalidArgument)
	}
	read := Policy{}
	switch *byDefault {
	case Direct.String():
		read.Default = Direct
	case Deny.String():
		read.Default = Deny
	default:
		return fmt.Errorf("policy: default %q: it is allow or deny: %w", *byDefault, errdefs.ErrInvalidArgument)
	}
	for _, list := range []struct {
		says    Action
		entries []json.RawMessage
	}{{Direct, allow}, {Deny, deny}} {
		for i, raw := range list.entries {
			r := Rule{Action: list.says}
			if err := object(raw, map[string]any{"to": &r.To, "ports": &r.Ports, "protocol": &r.Protocol}); err != nil {
				return fmt.Errorf("policy: %s, entry %d: %w: %w", list.says, i+1, err, errdefs.ErrInvalidArgument)
			}
			read.Rules = append(read.Rules, r)
		}
	}
	*p = read
	return nil
}

// object reads the fields of an object, each at most once and by its exact name, which encoding/json leaves open.
func object(b []byte, fields map[string]any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil {
		return err
	} else if t != json.Delim('{') {
		return fmt.Errorf("it takes an object, not %s", short(string(b)))
	}
	seen := map[string]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		name := key.(string) // between values of an object there is nothing else
		to, known := fields[name]
		switch {
		case !known:
			return fmt.Errorf("there is no field %s", short(strconv.Quote(name)))
		case seen[name]:
			return fmt.Errorf("field %s is there twice", name)
		}
		seen[name] = true
		if err := d.Decode(to); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	_, err := d.Token()
	return err
}
