package batch

import (
	"strings"
	"unicode/utf8"
)

// MaxText is how much is kept of what a command writes to one of its outputs, in bytes: its end.
const MaxText = 64 << 10

// Text is what a command has written.
type Text struct {
	// Omitted is how many bytes of the beginning are left out.
	Omitted int64
	kept    []byte
}

func (t *Text) add(b []byte) {
	t.kept = append(t.kept, b...)
	if over := len(t.kept) - MaxText; over > 0 {
		t.Omitted += int64(over)
		t.kept = t.kept[:copy(t.kept, t.kept[over:])]
	}
}

// String is what was kept. What isn't UTF-8 is replaced by U+FFFD.
func (t *Text) String() string {
	b := t.kept
	if t.Omitted > 0 { // maybe amid a character
		for n := 0; n < utf8.UTFMax-1 && len(b) > 0 && !utf8.RuneStart(b[0]); n++ {
			b = b[1:]
		}
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}
