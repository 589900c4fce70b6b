package agent

import (
	"bytes"
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/emptypb"
)

// What processes have left in memory that is free again isn't saved with a machine that is the beginning of others.
func TestQuiesceZeroesFreeMemory(t *testing.T) {
	const pattern = "what-a-process-left"
	dir := t.TempDir()
	m := boot(t, memoryOption(dir, "on")...)
	defer m.end()
	script := "cd /dev/shm && yes " + pattern + " | head -c 1048576 >a && for i in $(seq 48); do cat a; done >b && rm a b && echo gone"
	run := func(id, script, says string) {
		t.Run(id, func(t *testing.T) { // at whose end the container is removed
			if out, msg, code := m.output(t, id, containerSpec("sh", "-c", script)); out != says || code != 0 {
				t.Errorf("%q, %q, status %d", out, msg, code)
			}
		})
	}
	run("fills", script, "gone\n")
	before, used := pagesWith(t, memoryFile(dir), pattern)
	watch := time.Now()
	if _, err := m.agent.Quiesce(contextFor(t, 30*time.Second), &emptypb.Empty{}); err != nil {
		t.Fatal(err)
	}
	took := time.Since(watch)
	after, usedAfter := pagesWith(t, memoryFile(dir), pattern)
	t.Logf("%v; pages with the pattern: %d, then %d; that aren't zero: %d, then %d", took, before, after, used, usedAfter)
	if before < 8192 || after > before/8 {
		t.Errorf("%d pages hold what a process has left, of %d", after, before)
	}
	m.configure(t)
	run("after", "echo goes on", "goes on\n")
}

// pagesWith counts the pages of a file that hold a pattern, and those that aren't zero.
func pagesWith(t *testing.T, path, pattern string) (with, used int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page, zero := make([]byte, syscall.Getpagesize()), make([]byte, syscall.Getpagesize())
	for {
		if _, err := io.ReadFull(f, page); errors.Is(err, io.EOF) {
			return with, used
		} else if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(page, []byte(pattern)) {
			with++
		}
		if !bytes.Equal(page, zero) {
			used++
		}
	}
}
