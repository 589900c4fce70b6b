package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What is frozen with the cgroup above it goes on with that, unless it was frozen by itself before.
func TestFreezeAbove(t *testing.T) {
	g := group(t)
	var children []Group
	for _, name := range []string{"empty", "paused", "running"} {
		c := New(g.mountpoint, g.path+"/"+name)
		if err := os.Mkdir(c.dir(), 0o755); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = os.Remove(c.dir()) }()
		children = append(children, c)
	}
	for _, c := range children[1:] {
		p := run(t, c, "while :; do :; done")
		defer func() {
			_ = errors.Join(c.Kill(), c.WaitEmpty(testContext(t)))
			_ = p.Wait()
		}()
	}
	if err := children[1].Freeze(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := g.Freeze(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if got := states(t, children); got != "[1 1 1]" {
			t.Errorf("frozen above: %s", got)
		}
		if err := g.Thaw(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if got := states(t, children); got != "[0 1 0]" {
			t.Errorf("thawed above: %s", got)
		}
	}
}

// states tells which of them are frozen.
func states(t *testing.T, groups []Group) string {
	t.Helper()
	var all []uint64
	for _, g := range groups {
		n, err := g.value("cgroup.events", "frozen")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return fmt.Sprint(all)
}

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
