package jsonbody

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// read asks for a member of each kind.
func read(o *Object) (all []any) {
	o.Require("s")
	sub := o.Object("o")
	all = []any{o.String("s"), o.Int("i", 7, 0, math.MaxInt32), o.Bool("b", true), o.Strings("l"), o.Ints("p", 1, 65535), o.StringMap("m"), sub.String("in")}
	sub.Refuse("no", "it isn't supported")
	for _, item := range o.Objects("a") {
		all = append(all, item.String("in"))
	}
	return all
}

func TestRead(t *testing.T) {
	for body, want := range map[string][]any{
		`{"s":"x"}`: {"x", 7, true, []string(nil), []int(nil), map[string]string(nil), ""},
		` {"s":"x","i":null,"b":null,"l":null,"p":null,"m":null,"o":null} `:                                {"x", 7, true, []string(nil), []int(nil), map[string]string(nil), ""},
		`{"s":"","i":0,"b":false,"l":["a",""],"p":[1,65535],"m":{"a b":"c","":""},"o":{"in":"y","no":{}}}`: {"", 0, false, []string{"a", ""}, []int{1, 65535}, map[string]string{"a b": "c", "": ""}, "y"},
		`{"s":"x","a":[{"in":"y"},{}]}`:                     {"x", 7, true, []string(nil), []int(nil), map[string]string(nil), "", "y", ""},
		`{"s":"\u00e9","l":[],"p":[],"m":{},"o":{"no":[]}}`: {"é", 7, true, []string{}, []int{}, map[string]string{}, ""},
	} {
		o, err := Parse([]byte(body))
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if got := read(o); o.Err() != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v", body, got, o.Err())
		}
	}
	for _, body := range []string{"", " \n\t"} {
		if o, err := Parse([]byte(body)); err != nil || o.Err() != nil || o.Has("s") {
			t.Errorf("%q: %v", body, err)
		}
	}
}

// TestRefused: an error names the member and what it must be.
func TestRefused(t *testing.T) {
	for body, want := range map[string]string{
		``:                                 `s: it is required`,
		`{}`:                               `s: it is required`,
		`{"s":null}`:                       `s: it is required`,
		`{"S":"x"}`:                        `s: it is required`,
		`{"s":1}`:                          `s: it is a number, it must be a string`,
		`{"s":"x","i":"1"}`:                `i: it is a string, it must be a number`,
		`{"s":"x","i":1.5}`:                `i: "1.5" isn't an integer of 32 bits`,
		`{"s":"x","i":1e3}`:                `i: "1e3" isn't an integer of 32 bits`,
		`{"s":"x","i":4294967296}`:         `i: "4294967296" isn't an integer of 32 bits`,
		`{"s":"x","i":-1}`:                 `i: -1 is too small, it must be at least 0`,
		`{"s":"x","b":"true"}`:             `b: it is a string, it must be a boolean`,
		`{"s":"x","l":"a"}`:                `l: it is a string, it must be an array`,
		`{"s":"x","l":["a",null]}`:         `l[1]: it is null, it must be a string`,
		`{"s":"x","p":[80,0]}`:             `p[1]: 0 is out of range, it must be from 1 to 65535`,
		`{"s":"x","m":["a"]}`:              `m: it is an array, it must be an object`,
		`{"s":"x","m":{"a":"b","c":true}}`: `m["c"]: it is a boolean, it must be a string`,
		`{"s":"x","m":{"a":null}}`:         `m["a"]: it is null, it must be a string`,
		`{"s":"x","o":[]}`:                 `o: it is an array, it must be an object`,
		`{"s":"x","o":{"in":{}}}`:          `o.in: it is an object, it must be a string`,
		`{"s":"x","o":{"no":false}}`:       `o.no: it isn't supported`,
		`{"s":"x","o":{"no":[1]}}`:         `o.no: it isn't supported`,
		`{"s":"x","a":{}}`:                 `a: it is an object, it must be an array`,
		`{"s":"x","a":[{},1]}`:             `a[1]: it is a number, it must be an object`,
		`{"s":"x","a":[{},{"in":1}]}`:      `a[1].in: it is a number, it must be a string`,
		`{"s":"x","a":[{"what":1}]}`:       `a[0].what: unknown field`,
		`{"s":"x","what":1}`:               `what: unknown field`,
		`{"s":"x","what":null}`:            `what: unknown field`,
		`{"s":"x","a\nb: c":1}`:            `"a\nb: c": unknown field`,
		`{"s":"x","o":{"what":1}}`:         `o.what: unknown field`,
		`[]`:                               `the body is an array, it must be an object`,
		`null`:                             `the body is null, it must be an object`,
		`"{}"`:                             `the body is a string, it must be an object`,
		`{"s":"x"`:                         `at byte 8`,
		`{"s":"x",}`:                       `at byte 10`,
		`{"s":"x"}{}`:                      `after top-level value at byte 10`,
		`{"s":"x"} x`:                      `after top-level value at byte 11`,
		"{\"s\":\"\x00\"}":                 `at byte 7`,
		"{\"s\":\"\xff\"}":                 `it isn't UTF-8`,
		`{"s":"x","s":"y"}`:                `more than one "s"`,
		`{"s":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}`: `more than 32 levels`,
		`{"s":[` + strings.Repeat("0,", maxValues) + `0]}`:                `more than 65536 values`,
		`{"s":` + strings.Repeat("[", 100000):                             `the body isn't JSON`,
		`{"s":"x","m":{"` + strings.Repeat("é", 100) + `":1}}`:            `…"]: it is a number`,
	} {
		o, err := Parse([]byte(body))
		if err == nil {
			read(o)
			err = o.Err()
		}
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") || len(err.Error()) > 200 {
			t.Errorf("%.100s: %v, not %q", body, err, want)
		}
	}
}

// FuzzParse: what is read is what encoding/json reads, or an error of the right class.
func FuzzParse(f *testing.F) {
	for _, s := range []string{``, `{"s":"x","i":1,"b":true,"l":["a"],"p":[1],"m":{"a":"b"},"o":{"in":"y","no":[]}}`, `{"s":"x"} x`, `[`, `{"s":"\ud800"}`, `{"s":1e9999}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		o, err := Parse(body)
		var got []any
		if err == nil {
			got = read(o)
			err = o.Err()
		}
		if err != nil {
			if !errdefs.IsInvalidArgument(err) || strings.ContainsAny(err.Error(), "\n\r") {
				t.Errorf("%q: %v", body, err)
			}
			return
		}
		var want struct {
			S *string
			I *int32
			L []string
			P []int
			M map[string]string
		}
		if err := json.Unmarshal(body, &want); err != nil || want.S == nil {
			t.Fatalf("%q was read, but %v", body, err)
		}
		if got[0] != *want.S || want.I != nil && got[1] != int(*want.I) || !slices.Equal(got[3].([]string), want.L) || !slices.Equal(got[4].([]int), want.P) || len(got[5].(map[string]string)) != len(want.M) {
			t.Errorf("%q: %v", body, got)
		}
	})
}
