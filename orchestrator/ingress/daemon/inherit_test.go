package daemon

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestLogFile(t *testing.T) {
	dir := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	l := &logFile{f: open("log"), old: open("log.1")}
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []byte("ab") {
		full := append(bytes.Repeat([]byte{c}, maxLog), '\n')
		if _, err := l.Write(full); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Write([]byte("next\n")); err != nil {
			t.Fatal(err)
		}
		if got := read("log"); string(got) != "next\n" {
			t.Errorf("the log has %d bytes", len(got))
		}
		if got := read("log.1"); !bytes.HasSuffix(got, full) || len(got) > len(full)+len("next\n") {
			t.Errorf("%d bytes are set aside", len(got))
		}
	}
}
