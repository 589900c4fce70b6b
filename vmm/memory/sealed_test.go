package memory

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSealHeldPages: pages that somebody holds for a while, as a pipe does here, are sealed when that is over.
func TestSealHeldPages(t *testing.T) {
	f, err := memfd("held")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	content := bytes.Repeat([]byte("held"), os.Getpagesize())
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	n, err := unix.Splice(int(f.Fd()), new(int64), int(in.Fd()), nil, len(content), 0)
	if err := errors.Join(err, in.Close()); err != nil || n != int64(len(content)) {
		t.Fatalf("spliced %d bytes of %d, %v", n, len(content), err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("sealed while its pages are in a pipe: %v", err)
	}
	got := make(chan []byte)
	time.AfterFunc(200*time.Millisecond, func() {
		b, _ := io.ReadAll(out)
		got <- b
	})
	if err := addSeals(f); err != nil {
		t.Error(err)
	}
	if b := <-got; !bytes.Equal(b, content) {
		t.Errorf("%d bytes came out of the pipe", len(b))
	}
	if err := isSealed(f, int64(len(content))); err != nil {
		t.Error(err)
	}
}
