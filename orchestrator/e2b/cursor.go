package e2b

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// maxCursor bounds a cursor's length.
const maxCursor = 256

// list is what a cursor is good for: one kind of list, in one order, of what one filter lets through.
type list string

// listOf identifies a list by what was asked for, but for the size of its pages.
func listOf(kind string, filter any) list {
	b, err := json.Marshal(filter) // sorts what is in maps
	if err != nil {
		panic(fmt.Errorf("encode a filter: %w", err)) // it is made of strings and times
	}
	sum := sha256.Sum256(append([]byte(kind+"\x00"), b...))
	return list(hex.EncodeToString(sum[:8]))
}

// cursor is a place in the list, for clients to hand back; "" is its end.
func (l list) cursor(c lifecycle.Cursor) string {
	if c == (lifecycle.Cursor{}) {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString([]byte(fmt.Sprintf("1 %s %d %s", l, c.At.UnixNano(), c.ID)))
}

// place reads a cursor of the list. "" is its beginning.
func (l list) place(s string) (c lifecycle.Cursor, err error) {
	if s == "" {
		return c, nil
	}
	bad := invalid("nextToken: it isn't one that this API has given out")
	if len(s) > maxCursor {
		return c, bad
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(strings.TrimRight(s, "="))
	if err != nil {
		return c, bad
	}
	parts := strings.Split(string(b), " ")
	if len(parts) != 4 || parts[0] != "1" || len(parts[1]) != len(l) {
		return c, bad
	}
	nano, err := strconv.ParseInt(parts[2], 10, 64)
	if _, ref := db.ParseRef(parts[3]); err != nil || ref != nil {
		return c, bad
	}
	if parts[1] != string(l) {
		return c, invalid("nextToken: it is of a list in another order, or with another filter")
	}
	return lifecycle.Cursor{At: time.Unix(0, nano).UTC(), ID: parts[3]}, nil
}
