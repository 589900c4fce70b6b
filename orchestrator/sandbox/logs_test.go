package sandbox

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestFollowFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	write := func(s string) {
		if _, err := w.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	write("before\n")
	r, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()

	out, in := io.Pipe()
	ended, done := make(chan struct{}), make(chan error, 1)
	go func() {
		err := followFile(t.Context(), in, r, "c1", ended)
		in.Close()
		done <- err
	}()
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			lines <- s.Text()
		}
	}()
	expect := func(want string) {
		t.Helper()
		select {
		case got, ok := <-lines:
			if got != want || !ok {
				t.Fatalf("got %q (open: %v), want %q", got, ok, want)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%q didn't come", want)
		}
	}
	expect("before")
	write("while\n")
	expect("while")
	write("last\n")
	close(ended)
	expect("last")
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s, ok := <-lines; ok {
		t.Errorf("more: %q", s)
	}
}
