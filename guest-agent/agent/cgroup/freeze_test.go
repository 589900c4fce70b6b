package cgroup

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFreeze(t *testing.T) {
	g := group(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	dir, err := os.Open(g.dir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	c := exec.Command("/bin/sh", "-c", "while :; do echo; done")
	c.Stdout = w
	c.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	said := bufio.NewReader(r)
	if _, err := said.ReadByte(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := g.Freeze(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	// What is in the pipe comes, and no more.
	for err = nil; err == nil; {
		_ = r.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err = said.ReadByte()
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the frozen process: %v", err)
	}
	_ = r.SetReadDeadline(time.Now().Add(30 * time.Second))
	for range 2 {
		if err := g.Thaw(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := said.ReadByte(); err != nil {
		t.Fatalf("the thawed process: %v", err)
	}
	if err := errors.Join(g.Freeze(testContext(t)), g.Kill(), g.WaitEmpty(testContext(t))); err != nil {
		t.Errorf("kill of what is frozen: %v", err)
	}
	_ = c.Wait()
}
