package agent

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// wantLate checks that a call has run out of time, here or in the guest.
func wantLate(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, context.DeadlineExceeded) && status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v, want that the time is up", err)
	}
}

// At rest nothing works and nothing is changed, but what is to be killed dies; all else waits for the thaw.
func TestFreeze(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c, other := m.newContainer(t, "counts"), m.newContainer(t, "dies")
	c.run(t, containerSpec("sh", "-c", counter))
	other.run(t, containerSpec("sh", "-c", counter))
	counted(t, c.stdout)
	counted(t, other.stdout)
	m.freeze(t)
	m.session.Release()
	_, err := m.agent.Freeze(contextFor(t, 10*time.Second), &api.FreezeRequest{Number: m.freezes + 1})
	want(t, err, codes.FailedPrecondition, "at rest already")
	if err := m.signal(t, &api.SignalProcessRequest{Id: "dies", Signal: 9}); err != nil {
		t.Error(err)
	}
	if status := f.exit(t, "dies", ""); status != 137 {
		t.Errorf("status %d", status)
	}
	used := c.stats(t).CPU.GetUsageUsec()
	_, short, _, names := m.streams(t)
	_, err = m.agent.ExecProcess(contextFor(t, time.Second), &api.ExecProcessRequest{Id: c.id, ExecId: "e", Process: marshal(t, process("true")), Stdio: names})
	wantLate(t, err)
	_ = short.Close()
	if used = c.stats(t).CPU.GetUsageUsec() - used; used != 0 {
		t.Errorf("at rest, and has used %d µs", used)
	}
	deleted := make(chan error)
	go func() {
		_, err := m.agent.DeleteContainer(contextFor(t, 60*time.Second), &api.ContainerRequest{Id: "dies"})
		deleted <- err
	}()
	m.thaw(t)
	if err := <-deleted; err != nil {
		t.Errorf("a deletion that has waited: %v", err)
	}
	for range 20 {
		counted(t, c.stdout)
	}
	_, err = m.agent.Freeze(contextFor(t, 10*time.Second), &api.FreezeRequest{Number: m.freezes})
	want(t, err, codes.FailedPrecondition, "given it up")
	counted(t, c.stdout)
	c.kill(t, f)
}

// A freeze that has to wait for longer than its deadline has no effect; nor has one that is given up.
func TestFreezeInVain(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "goes-on")
	c.run(t, containerSpec("sh", "-c", counter))
	creating := make(chan error)
	go func() {
		_, err := m.agent.CreateContainer(contextFor(t, 5*time.Second), &api.CreateContainerRequest{
			Id: "waits", Spec: marshal(t, containerSpec("true")), Rootfs: &api.Rootfs{Disks: []*api.Disk{{Serial: "never", Fstype: "ext4"}}},
		})
		creating <- err
	}()
	for code := codes.NotFound; code == codes.NotFound; { // until its creation has begun
		_, err := m.agent.StartContainer(contextFor(t, 10*time.Second), &api.ContainerRequest{Id: "waits"})
		code = status.Code(err)
	}
	m.freezes++
	_, err := m.agent.Freeze(contextFor(t, time.Second), &api.FreezeRequest{Number: m.freezes})
	wantLate(t, err)
	counted(t, c.stdout)
	m.thaw(t) // the guest may be about to end it
	m.freezes++
	given := make(chan error)
	go func() {
		_, err := m.agent.Freeze(contextFor(t, 30*time.Second), &api.FreezeRequest{Number: m.freezes})
		given <- err
	}()
	m.thaw(t)
	want(t, <-given, codes.FailedPrecondition, "given it up")
	if err := <-creating; err == nil {
		t.Error("a container without a disk was created")
	}
	m.freeze(t)
	m.thaw(t)
	for range 20 {
		counted(t, c.stdout)
	}
	c.kill(t, f)
}
