package batch

import (
	"strings"
	"unicode/utf8"
)

// MaxText is how much is kept of what a command writes to one of its outputs, in bytes: its end.
const MaxText = 64 << 10

// Text is what a command has written.
type Text struct {
	end   []byte
	whole int64 // bytes
}

// add moves what is kept only when as much has come again: a command that writes byte by byte has this host do no more than it does.
func (t *Text) add(b []byte) {
	t.whole += int64(len(b))
	b = b[max(len(b)-MaxText, 0):]
	if len(t.end)+len(b) > 2*MaxText {
		t.end = t.end[:copy(t.end, t.kept())]
	}
	t.end = append(t.end, b...)
}

func (t *Text) kept() []byte { return t.end[max(len(t.end)-MaxText, 0):] }

// Omitted is how many bytes of the beginning are left out.
func (t *Text) Omitted() int64 { return max(t.whole-MaxText, 0) }

// String is what was kept. What isn't UTF-8 is replaced by U+FFFD.
func (t *Text) String() string {
	b := t.kept()
	if t.Omitted() > 0 { // maybe amid a character
		for n := 0; n < utf8.UTFMax-1 && len(b) > 0 && !utf8.RuneStart(b[0]); n++ {
			b = b[1:]
		}
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}
