// Package jsonbody reads requests' JSON objects strictly: each member that there is has to be asked for, with its type. What is
// wrong is told in a line that names the member, and where in the body a syntax error is.
package jsonbody

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// Object is a JSON object that is read member by member. A member that is null is as good as none. The first error of a body
// sticks, whichever of its objects it is of: Err tells it at last. What is read after an error is the default.
//
// Names are as in the body, in the same case.
type Object struct {
	path    string // "" is the body
	members map[string]*value
	names   []string // in their order
	asked   map[string]bool
	doc     *document
}

// document is what the objects of one body share.
type document struct {
	err     error
	objects []*Object
}

// Parse reads a body, which is an object, or nothing: an empty one then. Errors are errdefs.ErrInvalidArgument.
func Parse(body []byte) (*Object, error) {
	doc := &document{}
	v, err := parse(body)
	if err != nil {
		return nil, invalid("the body isn't JSON: %v", err)
	}
	if v == nil {
		return doc.object("", nil), nil
	}
	if v.kind != object {
		return nil, invalid("the body is %s, it must be an object", v.kind)
	}
	return doc.object("", v), nil
}

func (d *document) object(path string, v *value) *Object {
	o := &Object{path: path, asked: map[string]bool{}, doc: d}
	if v != nil {
		o.members, o.names = v.members, v.names
	}
	d.objects = append(d.objects, o)
	return o
}

// Err is the first thing that is wrong with the body: with what was asked for, or that there is something that nobody asked
// for.
func (o *Object) Err() error {
	for _, of := range o.doc.objects {
		for _, name := range of.names {
			if !of.asked[name] {
				of.Fail(plain(name), "unknown field")
			}
		}
	}
	return o.doc.err
}

// Failed is what is known to be wrong so far.
func (o *Object) Failed() error { return o.doc.err }

// Fail has a member be wrong, for a reason. The name may go on with an index or a key, as Index makes them.
func (o *Object) Fail(name, format string, args ...any) {
	if o.doc.err == nil {
		o.doc.err = invalid("%s: %s", join(o.path, name), fmt.Sprintf(format, args...))
	}
}

// Index names an element of an array.
func Index(name string, i int) string { return fmt.Sprintf("%s[%d]", name, i) }

// Key names a member of an object whose names are data.
func Key(name, key string) string { return fmt.Sprintf("%s[%s]", name, short(key)) }

// Has tells whether there is a member that isn't null.
func (o *Object) Has(name string) bool {
	v := o.members[name]
	return v != nil && v.kind != null
}

// Require has the absence of a member be an error.
func (o *Object) Require(name string) {
	if !o.Has(name) {
		o.Fail(name, "it is required")
	}
}

// get is a member of that kind. It is nil if there is none, or one of another kind, which is an error.
func (o *Object) get(name string, k kind) *value {
	o.asked[name] = true
	if !o.Has(name) {
		return nil
	}
	return o.is(name, o.members[name], k)
}

// is a value if it is of that kind. name is the error's.
func (o *Object) is(name string, v *value, k kind) *value {
	if v.kind != k {
		o.Fail(name, "it is %s, it must be %s", v.kind, k)
		return nil
	}
	return v
}

// String is a member that is a string, "" by default.
func (o *Object) String(name string) string {
	if v := o.get(name, text); v != nil {
		return v.text
	}
	return ""
}

// Bool is a member that is true or false.
func (o *Object) Bool(name string, byDefault bool) bool {
	if v := o.get(name, boolean); v != nil {
		return v.truth
	}
	return byDefault
}

// Int is a member that is an integer in a range, which is within 32 bits.
func (o *Object) Int(name string, byDefault, least, most int) int {
	v := o.get(name, number)
	if v == nil {
		return byDefault
	}
	return o.integer(name, v, least, most)
}

func (o *Object) integer(name string, v *value, least, most int) int {
	n, err := strconv.ParseInt(v.text, 10, 32)
	switch {
	case err != nil:
		o.Fail(name, "%s isn't an integer of 32 bits", short(v.text))
	case n < int64(least) || n > int64(most):
		if most == math.MaxInt32 {
			o.Fail(name, "%d is too small, it must be at least %d", n, least)
		} else {
			o.Fail(name, "%d is out of range, it must be from %d to %d", n, least, most)
		}
	}
	return int(n)
}

// Object is a member that is an object; an empty one by default.
func (o *Object) Object(name string) *Object {
	return o.doc.object(join(o.path, name), o.get(name, object))
}

// Strings is a member that is an array of strings, nil by default.
func (o *Object) Strings(name string) []string {
	return list(o, name, text, func(_ string, v *value) string { return v.text })
}

// Objects is a member that is an array of objects.
func (o *Object) Objects(name string) []*Object {
	return list(o, name, object, func(at string, v *value) *Object { return o.doc.object(join(o.path, at), v) })
}

// Ints is a member that is an array of integers in a range.
func (o *Object) Ints(name string, least, most int) []int {
	return list(o, name, number, func(at string, v *value) int { return o.integer(at, v, least, most) })
}

func list[T any](o *Object, name string, k kind, of func(at string, v *value) T) []T {
	v := o.get(name, array)
	if v == nil {
		return nil
	}
	l := make([]T, 0, len(v.items))
	for i, item := range v.items {
		at := Index(name, i)
		if o.is(at, item, k) == nil {
			return nil
		}
		l = append(l, of(at, item))
	}
	return l
}

// StringMap is a member that is an object whose names are data and whose values are strings; nil by default.
func (o *Object) StringMap(name string) map[string]string {
	v := o.get(name, object)
	if v == nil {
		return nil
	}
	return o.stringMap(name, v)
}

// StringMaps is a member that is an array of such objects.
func (o *Object) StringMaps(name string) []map[string]string {
	return list(o, name, object, o.stringMap)
}

func (o *Object) stringMap(name string, v *value) map[string]string {
	m := make(map[string]string, len(v.members))
	for _, key := range v.names {
		if o.is(Key(name, key), v.members[key], text) == nil {
			return nil
		}
		m[key] = v.members[key].text
	}
	return m
}

// Refuse has a member be an error, for a reason, unless it is null, or an array or object that is empty.
func (o *Object) Refuse(name, why string) {
	o.asked[name] = true
	if v := o.members[name]; o.Has(name) && (v.kind != array && v.kind != object || len(v.items)+len(v.members) > 0) {
		o.Fail(name, "%s", why)
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// plain is a name that nobody asked for, quoted if it could be taken for anything else.
func plain(name string) string {
	if quoted := short(name); quoted != `"`+name+`"` || strings.ContainsAny(name, " :.") {
		return quoted
	}
	return name
}

// short quotes what is the client's, as far as it is of use in a line.
func short(s string) string {
	const most = 64
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return strconv.Quote(s)
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}
