// Command containerd-shim-cube-v2 is the containerd shim of the runtime io.cube.v2: each container in a virtual machine
// of its own.
package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/containerd/containerd/v2/pkg/shim"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/manager"
	"github.com/cubesandbox/cube/shim/task"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/record"
)

func main() {
	task.Register(task.Machines{
		Launcher: func(cfg *config.Config, log *slog.Logger) vmm.Launcher {
			return base.NewLauncher(cfg, guest.Settle(cfg.Timeout), log)
		},
		Cleanup: record.Cleanup,
	})
	shim.RunShim(context.Background(), &manager.Manager{Runtime: "io.cube.v2", Cleanup: record.Cleanup, Sweep: sweep}, func(c *shim.Config) {
		// The children are waited for one by one; a reaper would take their statuses away.
		c.NoReaper, c.NoSubreaper = true, true
	})
}

// sweep cleans up after the machines whose owners are gone.
func sweep(cfg *config.Config) error {
	left, err := record.Leftovers(cfg)
	for _, l := range left {
		err = errors.Join(err, record.Cleanup(cfg, l.Dir))
	}
	return err
}
