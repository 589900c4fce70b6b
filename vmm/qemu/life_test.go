package qemu_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
)

func TestKilled(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := restored(t, cfg, "killed")
	g.Must(t, cfg, "say these were the last words")
	pid := m.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	death := ended(t, m, cfg.Timeout(time.Second))
	if !death.Killed || !strings.Contains(death.Reason, "signal: killed") || !strings.HasSuffix(death.Console, "these were the last words") {
		t.Errorf("got %+v", death)
	}
	if strings.ContainsAny(death.Error(), "\n\r\x1b") {
		t.Errorf("not one printable line: %q", death.Error())
	}
	if m.PID() != pid {
		t.Errorf("pid %d, was %d", m.PID(), pid)
	}
	ctx := within(t, time.Second)
	for name, err := range map[string]error{
		"pause":  m.Pause(ctx),
		"resume": m.Resume(ctx),
		"limit":  m.SetCPULimit(ctx, 1),
		"add":    m.AddDisk(ctx, vmm.Disk{Serial: "x", File: image(t, t.TempDir(), 1<<20)}),
	} {
		if !errors.Is(err, vmm.ErrGone) {
			t.Errorf("%s: %v, want ErrGone", name, err)
		}
	}
	if _, err := io.Copy(io.Discard, m.Agent()); err != nil {
		t.Errorf("the agent channel: %v, want end of file", err)
	}
	if err := m.Stop(ctx); err != nil {
		t.Error(err)
	}
	if !errors.As(m.Err(), &death) {
		t.Errorf("after Stop: %v, want the DeathError still", m.Err())
	}
}

func TestGuestEnds(t *testing.T) {
	cfg := testguest.Config(t)
	for _, tc := range []struct{ command, reason, console string }{
		{"panic", "guest panicked", "Kernel panic - not syncing"},
		{"poweroff", "guest powered off", ""},
		{"reboot", "guest reset itself", ""},
	} {
		t.Run(tc.command, func(t *testing.T) {
			m, g := restored(t, cfg, tc.command)
			if answer, err := g.Do(cfg, "%s", tc.command); err == nil {
				t.Errorf("the guest lives: %s", answer)
			}
			death := ended(t, m, cfg.Timeout(5*time.Second))
			if death.Reason != tc.reason || !strings.Contains(string(m.Console()), tc.console) {
				t.Errorf("got %+v", death)
			}
		})
	}
}

func TestStopWaitsForTheGuest(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := restored(t, cfg, "orderly")
	stopped := make(chan error)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(30*time.Second))
		defer cancel()
		stopped <- m.Stop(ctx)
	}()
	select {
	case err := <-stopped:
		t.Fatalf("Stop did not wait: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	_, _ = g.Do(cfg, "poweroff")
	if err := <-stopped; err != nil || m.Err() != nil {
		t.Fatalf("stop: %v, err: %v", err, m.Err())
	}
}

func TestStopForces(t *testing.T) {
	cfg := testguest.Config(t)
	m, _ := restored(t, cfg, "stuck")
	if err := syscall.Kill(m.PID(), syscall.SIGSTOP); err != nil { // it won't answer QMP
		t.Fatal(err)
	}
	start := time.Now()
	if err := m.Stop(gone()); err != nil || m.Err() != nil {
		t.Fatalf("stop: %v, err: %v", err, m.Err())
	}
	if d := time.Since(start); d > cfg.Timeout(5*time.Second) {
		t.Errorf("took %s", d)
	}
	if err := m.Stop(gone()); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

func TestPauseResume(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := restored(t, cfg, "paused")
	ctx := within(t, cfg.Timeout(10*time.Second))
	for range 2 {
		if err := m.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	answer := make(chan error)
	go func() {
		_, err := g.Do(cfg, "ping")
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Fatalf("a paused guest answers: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	for range 2 {
		if err := m.Resume(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
}

// A memory that a machine writes to is no other's as long as its QEMU lives, whatever else has the file; then it can be.
func TestMemoryHasOneOwner(t *testing.T) {
	cfg := testguest.Config(t)
	first := restoreSpec(t, cfg, "first")
	first.Share = true
	var err error
	if first.Memory, err = memory.Scratch(int64(shape.MemoryMiB) << 20); err != nil {
		t.Fatal(err)
	}
	defer first.Memory.Close()
	if _, err := memory.Copy(first.Memory, template.memory, int64(shape.MemoryMiB)<<20); err != nil {
		t.Fatal(err)
	}
	m, _ := start(t, cfg, first)
	second := func(share bool) *qemu.Spec {
		s := restoreSpec(t, cfg, "second")
		s.Memory, s.Share = first.Memory, share
		return s
	}
	for share, want := range map[bool]string{true: "has this memory for its own", false: "seals"} {
		other, err := qemu.NewDriver(cfg, slog.Default()).Start(t.Context(), second(share))
		if err == nil {
			_ = other.Stop(gone())
			t.Fatalf("a second machine runs in the memory of the first, shared: %v", share)
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("shared: %v: %v", share, err)
		}
	}
	if err := unix.Kill(m.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(t, m, cfg.Timeout(10*time.Second))
	if _, err := memory.Copy(first.Memory, template.memory, int64(shape.MemoryMiB)<<20); err != nil {
		t.Fatal(err)
	}
	start(t, cfg, second(true))
}

func TestStartFails(t *testing.T) {
	cfg := testguest.Config(t)
	garbage := image(t, t.TempDir(), 16<<10)
	small, _, err := memory.Seal(garbage, 16<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	for _, tc := range []struct {
		name, want string
		spoil      func(*qemu.Spec)
	}{
		{"damaged state", "restore", func(s *qemu.Spec) { s.State = garbage }},
		{"no QEMU", "run the set-up", func(s *qemu.Spec) { s.QEMU = "/nonexistent" }},
		{"QEMU is not there", "execute /usr/bin/qemu", func(s *qemu.Spec) { s.QEMU = emptyRoot(t) }},
		{"no such network namespace", "network namespace", func(s *qemu.Spec) { s.NetNS = "/nonexistent" }},
		{"not a network namespace", "network", func(s *qemu.Spec) { s.NetNS = "/proc/self/ns/mnt" }},
		{"not a tap", "no tap", func(s *qemu.Spec) { s.Tap = garbage }},
		{"a tap without a header", "IFF_VNET_HDR", func(s *qemu.Spec) { s.Tap = tap(t, newNetNS(t), unix.IFF_TAP|unix.IFF_NO_PI) }},
		{"memory of the wrong size", "its size is", func(s *qemu.Spec) { s.Memory = small }},
		{"memory that isn't sealed", "seals", func(s *qemu.Spec) { s.Memory = garbage }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := restoreSpec(t, cfg, "fails")
			tc.spoil(s)
			m, err := qemu.NewDriver(cfg, slog.Default()).Start(within(t, cfg.Timeout(20*time.Second)), s)
			if err == nil {
				_ = m.Stop(gone())
				t.Fatal("it started")
			}
			if !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v", err)
			}
			t.Log(err)
			if left, _ := filepath.Glob(filepath.Join(cfg.RunDir, "uids", "*")); len(left) > 0 {
				t.Errorf("uids left: %v", left)
			}
			if _, err := os.Stat(s.Dir); err == nil {
				t.Errorf("%s is left", s.Dir)
			}
			if left, _ := filepath.Glob("/sys/fs/cgroup/*/cube/fails-*"); len(left) > 0 {
				t.Errorf("cgroups left: %v", left)
			}
		})
	}
}

// emptyRoot is a QEMU directory without QEMU.
func emptyRoot(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"proc", "dev"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The jail lets QEMU at /dev/kvm, whatever KVM is good for on this host: what fails then is not access to it.
func TestKVMInJail(t *testing.T) {
	cfg := testguest.Config(t)
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		t.Skip(err)
	} else {
		f.Close()
	}
	s := bootSpec(t, cfg, "kvm")
	s.Accel = accel.KVM
	m, err := qemu.NewDriver(cfg, slog.Default()).Start(within(t, cfg.Timeout(20*time.Second)), s)
	if err == nil {
		t.Log("QEMU runs under KVM")
		if err := m.Stop(gone()); err != nil {
			t.Error(err)
		}
		return
	}
	t.Log(err)
	var boot *vmm.BootError
	if !errors.As(err, &boot) || strings.Contains(err.Error(), "access KVM") || strings.Contains(err.Error(), "/dev/kvm") {
		t.Errorf("got %v", err)
	}
}
