package qemu

import (
	"bytes"
	"io"
	"strings"
	"testing"
)

func TestRing(t *testing.T) {
	const size = 8
	for _, writes := range [][]string{
		{}, {"abc"}, {"abcdefgh"}, {"abcd", "efgh"}, {"abcd", "efgh", "ij"}, {"abcdefghijk"}, {"abc", "defghijklmnop", "q"},
		{"1", "2", "3", "4", "5", "6", "7", "8", "9"}, {"abcdefgh", ""}, {"abcdefg", "hijklmn", "opqrst"},
	} {
		r := newRing(size)
		for _, w := range writes {
			if n, err := r.Write([]byte(w)); n != len(w) || err != nil {
				t.Fatal(n, err)
			}
		}
		all := strings.Join(writes, "")
		if want := all[max(len(all)-size, 0):]; string(r.Bytes()) != want {
			t.Errorf("%q: kept %q, want %q", writes, r.Bytes(), want)
		}
	}
}

func TestFollow(t *testing.T) {
	r := newRing(consoleSize)
	in, out := io.Pipe()
	done := r.follow(in)
	line := bytes.Repeat([]byte("x"), 1000)
	for range 100 {
		if _, err := out.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	out.Close()
	<-done
	if n := len(r.Bytes()); n != consoleSize {
		t.Errorf("%d bytes kept", n)
	}
}

func TestTail(t *testing.T) {
	for in, want := range map[string]string{
		"":                            "",
		"\n\n  \n":                    "",
		"one\r\ntwo\n":                "one | two",
		"a\x1b[31mred\x00\x07\tb\n":   "a[31mred b",
		"\xff\xfeok\n":                "ok",
		"1\n2\n3\n4\n5\n6\n7\n8\n9\n": "2 | 3 | 4 | 5 | 6 | 7 | 8 | 9",
		"\u202etxt.exe":               "txt.exe", // no direction override
	} {
		if got := tail([]byte(in)); got != want {
			t.Errorf("%q gives %q, want %q", in, got, want)
		}
	}
	if got := tail(bytes.Repeat([]byte("é"), 100_000)); len(got) > tailSize+len("…") || strings.ContainsRune(got, '\uFFFD') {
		t.Errorf("%d bytes", len(got))
	}
}

func FuzzTail(f *testing.F) {
	f.Add([]byte("\x1b]0;title\x07\n\u2028"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := tail(b)
		if strings.ContainsAny(s, "\n\r\x1b\x00\u2028\u2029") || len(s) > tailSize+len("…") {
			t.Errorf("%q gives %q", b, s)
		}
	})
}
