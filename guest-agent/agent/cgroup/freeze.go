package cgroup

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// Freeze stops all processes in the cgroup and below it, and returns when all stand still. Signals wait until Thaw, but
// for SIGKILL, which ends a frozen process. When it fails, they may be frozen or about to be: call Thaw.
func (g Group) Freeze(ctx context.Context) error { return g.freeze(ctx, "1") }

// Thaw lets them go on.
func (g Group) Thaw(ctx context.Context) error { return g.freeze(ctx, "0") }

// freeze writes the state and waits until the kernel says that it is reached.
func (g Group) freeze(ctx context.Context, frozen string) error {
	if err := os.WriteFile(filepath.Join(g.dir(), "cgroup.freeze"), []byte(frozen), 0); err != nil {
		if gone(err) == nil {
			return nil
		}
		return fmt.Errorf("freeze or thaw cgroup %s: %w", g.path, err)
	}
	reached := func() (bool, error) {
		if _, err := os.Stat(g.dir()); err != nil {
			return true, gone(err)
		}
		n, err := g.value("cgroup.events", "frozen")
		return (n == 1) == (frozen == "1"), err
	}
	if done, err := reached(); done || err != nil { // as a thaw is at once, so that nothing needs be watched
		return err
	}
	return g.watch(ctx, "cgroup.events", reached)
}
