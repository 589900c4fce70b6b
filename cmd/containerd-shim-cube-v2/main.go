// Command containerd-shim-cube-v2 is the containerd shim of the runtime io.cube.v2: each container in a virtual machine
// of its own.
package main

import (
	"errors"
	"log/slog"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/server"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/record"
)

func main() {
	shim.Run(server.Machines{
		Launcher: func(cfg *config.Config, log *slog.Logger) vmm.Launcher {
			return base.NewLauncher(cfg, guest.Settle(cfg.Timeout), log)
		},
		Cleanup: record.Cleanup,
	}, sweep)
}

// sweep cleans up after the machines whose owners are gone.
func sweep(cfg *config.Config) error {
	left, err := record.Leftovers(cfg)
	for _, l := range left {
		err = errors.Join(err, l.Cleanup(cfg))
	}
	return err
}
