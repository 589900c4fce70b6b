package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// object decodes an object whose fields are each there at most once and by their exact names, which encoding/json leaves
// open. b is valid JSON, as it is for an Unmarshaler. A policy has thousands of objects, and is read with every record: a
// json.Decoder for each, which tells of names too, takes several times as long.
func object(b []byte, to any, fields ...string) error {
	rest := after(b, 0)
	if len(rest) == 0 || rest[0] != '{' {
		return fmt.Errorf("it takes an object, not %s", short(string(b)))
	}
	var seen uint64 // a bit for each of the fields
	for rest = after(rest, '{'); len(rest) > 0 && rest[0] == '"'; rest = after(rest, ',') {
		key := rest[:end(rest)]
		rest = after(rest[len(key):], ':')
		rest = rest[end(rest):]
		name := string(bytes.Trim(key, `"`))
		i := slices.Index(fields, name)
		switch {
		case i < 0:
			return fmt.Errorf("there is no field %s", short(strconv.Quote(name)))
		case seen&(1<<i) != 0:
			return fmt.Errorf("field %s is there twice", name)
		}
		seen |= 1 << i
	}
	err := json.Unmarshal(b, to)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s: it can't be %s", wrong.Field, wrong.Value)
	}
	return err
}

// after is what comes after a sign that may be there, and after white space.
func after(b []byte, sign byte) []byte {
	const space = " \t\r\n"
	b = bytes.TrimLeft(b, space)
	if len(b) > 0 && b[0] == sign {
		b = bytes.TrimLeft(b[1:], space)
	}
	return b
}

// end is where the value ends that b begins with.
func end(b []byte) int {
	depth, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			depth--
		}
		switch {
		case quoted || depth > 0:
		case depth < 0: // the object's that it is in
			return i
		case b[i] == '"' || b[i] == '}' || b[i] == ']':
			return i + 1
		case bytes.IndexByte([]byte(", \t\r\n"), b[i]) >= 0: // of a number or a word
			return i
		}
	}
	return len(b)
}
