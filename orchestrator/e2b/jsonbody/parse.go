package jsonbody

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// maxDepth bounds how deep objects and arrays are within each other.
const maxDepth = 32

// maxValues bounds how many values a body has in all: each takes a hundred bytes and more, of which two are the client's.
const maxValues = 1 << 16

// kind is the kind of a JSON value, as it is called in errors.
type kind string

const (
	object  kind = "an object"
	array   kind = "an array"
	text    kind = "a string"
	number  kind = "a number"
	boolean kind = "a boolean"
	null    kind = "null"
)

type value struct {
	kind    kind
	text    string // of a string; of a number, as it is written
	truth   bool
	items   []*value
	members map[string]*value
	names   []string // of the members, in their order
}

// parse returns the one value that is in b, nil if there is nothing in it.
func parse(b []byte) (*value, error) {
	if len(bytes.TrimSpace(b)) == 0 {
		return nil, nil
	}
	// The decoder below replaces what isn't UTF-8, and reads one value of many.
	if !utf8.Valid(b) {
		return nil, errors.New("it isn't UTF-8")
	}
	var whole json.RawMessage
	if err := json.Unmarshal(b, &whole); err != nil {
		if at := (*json.SyntaxError)(nil); errors.As(err, &at) {
			return nil, fmt.Errorf("%w at byte %d", err, at.Offset)
		}
		return nil, err
	}
	p := &parser{Decoder: json.NewDecoder(bytes.NewReader(b))}
	p.UseNumber()
	return p.next(0)
}

// parser reads values one by one.
type parser struct {
	*json.Decoder
	values int // so far
}

func (p *parser) next(depth int) (*value, error) {
	if p.values++; p.values > maxValues {
		return nil, fmt.Errorf("there are more than %d values", maxValues)
	}
	if depth > maxDepth {
		return nil, fmt.Errorf("there are more than %d levels at byte %d", maxDepth, p.InputOffset())
	}
	t, err := p.Token()
	if err != nil {
		return nil, err
	}
	switch t := t.(type) {
	case string:
		return &value{kind: text, text: t}, nil
	case json.Number:
		return &value{kind: number, text: t.String()}, nil
	case bool:
		return &value{kind: boolean, truth: t}, nil
	case json.Delim:
		if t == '[' {
			return p.elements(depth)
		}
		return p.members(depth)
	}
	return &value{kind: null}, nil
}

func (p *parser) elements(depth int) (*value, error) {
	v := &value{kind: array}
	for p.More() {
		item, err := p.next(depth + 1)
		if err != nil {
			return nil, err
		}
		v.items = append(v.items, item)
	}
	_, err := p.Token()
	return v, err
}

func (p *parser) members(depth int) (*value, error) {
	v := &value{kind: object, members: map[string]*value{}}
	for p.More() {
		t, err := p.Token()
		if err != nil {
			return nil, err
		}
		name := t.(string) // the decoder sees to it
		if v.members[name] != nil {
			return nil, fmt.Errorf("there is more than one %s at byte %d", short(name), p.InputOffset())
		}
		m, err := p.next(depth + 1)
		if err != nil {
			return nil, err
		}
		v.members[name] = m
		v.names = append(v.names, name)
	}
	_, err := p.Token()
	return v, err
}
