package server

import (
	"bufio"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// TestLogWaitsForNobody: not for a containerd that reads nothing, nor for one that has gone; the next one reads on.
func TestLogWaitsForNobody(t *testing.T) {
	before := log.L.Logger.Out
	defer log.L.Logger.SetOutput(before)
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, unix.SIGPIPE) // as pkg/shim does
	defer signal.Stop(broken)

	path := filepath.Join(t.TempDir(), "log")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	containerd := func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	first := containerd()
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0) // blocking, as pkg/shim's is
	if err != nil {
		t.Fatal(err)
	}
	stderr := os.NewFile(uintptr(fd), "stderr")
	defer stderr.Close()
	logger := openLog(stderr)

	say := func(what string) {
		t.Helper()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 2 * logRoom / 1000 {
				logger.Info(what, "pad", strings.Repeat("x", 1000))
				log.L.Warn(what)
			}
		}()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Fatalf("it waits when containerd %s", what)
		}
	}
	say("reads nothing")
	first.Close()
	say("is gone")
	second := containerd()
	defer second.Close()
	for err := error(nil); err == nil; { // it reads what was left
		second.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err = second.Read(make([]byte, logRoom))
	}
	logger.Info("hello again")
	log.L.Warn("hello from below")
	second.SetReadDeadline(time.Now().Add(10 * time.Second))
	lines := bufio.NewScanner(second)
	for _, want := range []string{"hello again", "hello from below"} {
		if !lines.Scan() || !strings.Contains(lines.Text(), want) {
			t.Errorf("%q, want %q: %v", lines.Text(), want, lines.Err())
		}
	}
}
