package e2b

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// maxUnix is the year 9999, in seconds since 1970.
const maxUnix = 253402300799

// query reads a request's query strictly, as jsonbody does bodies: the first error sticks, and what nobody asks for is one.
type query struct {
	values url.Values
	asked  []string
	err    error
}

func readQuery(r *http.Request) *query {
	q := &query{}
	var err error
	if q.values, err = url.ParseQuery(r.URL.RawQuery); err != nil {
		q.err = invalid("the query can't be read: %v", err)
	}
	return q
}

// Err is the first thing that is wrong.
func (q *query) Err() error {
	for name := range q.values {
		if !slices.Contains(q.asked, name) {
			q.fail(quote(name), "unknown parameter")
		}
	}
	return q.err
}

func (q *query) fail(name, format string, args ...any) {
	if q.err == nil {
		q.err = invalid("%s: %s", name, fmt.Sprintf(format, args...))
	}
}

// text is a parameter, "" by default.
func (q *query) text(name string) string {
	q.asked = append(q.asked, name)
	all := q.values[name]
	if len(all) > 1 {
		q.fail(name, "it is there more than once")
	}
	if len(all) == 0 {
		return ""
	}
	return all[0]
}

// list is a parameter whose values are separated by commas, or given one by one.
func (q *query) list(name string) []string {
	q.asked = append(q.asked, name)
	var list []string
	for _, v := range q.values[name] {
		if v != "" {
			list = append(list, strings.Split(v, ",")...)
		}
	}
	return list
}

// number is an integer in a range.
func (q *query) number(name string, byDefault, least, most int64) int64 {
	s := q.text(name)
	if s == "" {
		return byDefault
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < least || n > most {
		q.fail(name, "%s isn't an integer from %d to %d", quote(s), least, most)
	}
	return n
}

// choice is one of several words, the first by default.
func (q *query) choice(name string, words ...string) string {
	s := q.text(name)
	if s == "" {
		return words[0]
	}
	if !slices.Contains(words, s) {
		q.fail(name, "%s isn't one of %s", quote(s), strings.Join(words, ", "))
	}
	return s
}

// time is a moment as of RFC 3339, zero by default.
func (q *query) time(name string) time.Time {
	s := q.text(name)
	if s == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		q.fail(name, "%s isn't a time like 2026-01-31T12:00:00Z", quote(s))
	}
	return t
}

// quote has what is the client's in a line, as far as it is of use there.
func quote(s string) string {
	const most = 100
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return strconv.Quote(s)
}

// unix is a moment in seconds since 1970, zero by default.
func (q *query) unix(name string) time.Time {
	if n := q.number(name, -1, 0, maxUnix); n >= 0 {
		return time.Unix(n, 0)
	}
	return time.Time{}
}

// milliseconds is unix in milliseconds.
func (q *query) milliseconds(name string) time.Time {
	if n := q.number(name, -1, 0, maxUnix*1000); n >= 0 {
		return time.UnixMilli(n)
	}
	return time.Time{}
}
