package templates

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

const (
	// readyTimeout bounds how long what runs in the machine takes to be ready.
	readyTimeout = 5 * time.Minute
	// saidLines is how much of what it has written is told when it isn't.
	saidLines = 10
)

// command is what the machine's first process is: envd's init, which runs the template's command.
func command(r Request) []string {
	args := []string{"init", "-user", r.User, "-workdir", r.Workdir}
	if r.Run != "" {
		args = append(args, "--", "/bin/bash", "-l", "-c", r.Run)
	}
	return args
}

// await waits until what runs in a machine is ready: it says so itself, and serves the hook.
func (b *Builder) await(ctx context.Context, addr netip.Addr, r Request) error {
	if r.Ready != "" {
		if err := b.Guests.Until(ctx, addr, r.Ready); err != nil {
			return fmt.Errorf("what runs in it isn't ready: %s: %w", r.Ready, err)
		}
	}
	if r.Hook != nil {
		if err := b.Guests.Listens(ctx, addr, r.Hook.Port); err != nil {
			return fmt.Errorf("port %d of the init hook: nothing that runs in it listens there: %w", r.Hook.Port, err)
		}
	}
	return nil
}

// said is an error with the last lines that a machine has written.
func (b *Builder) said(ctx context.Context, id string) error {
	entries, err := b.Machines.Log(ctx, id, lifecycle.LogQuery{Backward: true, Limit: saidLines})
	if err != nil {
		return fmt.Errorf("its output can't be read: %w", err)
	}
	lines := make([]string, len(entries))
	for i, e := range entries {
		lines[len(lines)-1-i] = e.Message
	}
	return errors.New("the end of its output: " + strings.Join(lines, " | "))
}
