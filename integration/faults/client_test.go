package faults

import (
	"context"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"golang.org/x/sys/unix"
)

// asked is a task as a client of containerd has it, with every call bounded and timed.
type asked struct {
	*testing.T
	client.Task
}

// ask finds the task of a container.
func ask(t *testing.T, id string) *asked {
	t.Helper()
	c, err := client.New(s.Config.ContainerdSocket())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	a := &asked{T: t}
	a.within(heard, "find the task", func(ctx context.Context) error {
		container, err := c.LoadContainer(ctx, id)
		if err == nil {
			a.Task, err = container.Task(ctx, cio.Load)
		}
		return err
	})
	if a.Task == nil {
		t.FailNow()
	}
	return a
}

// within makes a call that has to succeed in this time, and says how long it took.
func (a *asked) within(limit time.Duration, what string, call func(context.Context) error) time.Duration {
	a.Helper()
	// A call that is too slow shall say so itself, rather than be cut.
	ctx, cancel := context.WithTimeout(named(), s.Config.Timeout(time.Minute))
	defer cancel()
	began := time.Now()
	err := call(ctx)
	took := time.Since(began)
	if err != nil {
		a.Errorf("%s: %v", what, err)
	}
	if took > s.Config.Timeout(limit) {
		a.Errorf("%s took %v, more than %v", what, took, limit)
	}
	return took
}

func named() context.Context {
	return namespaces.WithNamespace(context.Background(), s.Config.Containerd.Namespace)
}

// state sees that the task has that status.
func (a *asked) state(limit time.Duration, want client.ProcessStatus) time.Duration {
	a.Helper()
	return a.within(limit, "State", func(ctx context.Context) error {
		status, err := a.Status(ctx)
		if err == nil && status.Status != want {
			a.Errorf("it is %s, want %s", status.Status, want)
		}
		return err
	})
}

func (a *asked) pids(limit time.Duration) time.Duration {
	a.Helper()
	return a.within(limit, "Pids", func(ctx context.Context) error { _, err := a.Pids(ctx); return err })
}

func (a *asked) stats(limit time.Duration) time.Duration {
	a.Helper()
	return a.within(limit, "Stats", func(ctx context.Context) error { _, err := a.Metrics(ctx); return err })
}

func (a *asked) kill(limit time.Duration) time.Duration {
	a.Helper()
	return a.within(limit, "Kill", func(ctx context.Context) error { return a.Kill(ctx, unix.SIGKILL) })
}

// wait waits for the end.
func (a *asked) wait(limit time.Duration, want uint32) time.Duration {
	a.Helper()
	return a.within(limit, "Wait", func(ctx context.Context) error {
		ch, err := a.Wait(ctx)
		if err != nil {
			return err
		}
		status := <-ch
		if status.Error() == nil && status.ExitCode() != want {
			a.Errorf("it ended with %d, want %d", status.ExitCode(), want)
		}
		return status.Error()
	})
}
