package files

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPatient: a pipe whose other end is there and does nothing holds a transfer up for so long.
func TestPatient(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	must(t, unix.Mkfifo(path, 0o600))
	other, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer other.Close()
	src, _, err := open(path)
	must(t, err)
	defer src.Close()
	dst, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	must(t, err)
	defer dst.Close()
	if _, err := (patient{src, 20 * time.Millisecond}).Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if n, err := (patient{dst, 20 * time.Millisecond}).Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 {
		t.Error(n, err)
	}
	if n, err := (patient{src, stall}).Read(make([]byte, 10)); n != 10 || err != nil {
		t.Error(n, err)
	}
}
