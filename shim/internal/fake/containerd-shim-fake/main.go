// Command containerd-shim-fake is the shim with machines that live in its own process: everything but the virtual
// machine and the agent is what containerd-shim-cube-v2 has. The conformance suite builds it.
package main

import (
	"log/slog"
	"os"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/server"
	"github.com/cubesandbox/cube/vmm"
)

func main() {
	launcher := &fake.Launcher{}
	shim.Run(server.Machines{
		Launcher: func(*config.Config, *slog.Logger) vmm.Launcher { return launcher },
		Cleanup:  func(_ *config.Config, dir string) error { return os.RemoveAll(dir) },
	}, func(*config.Config) error { return nil }) // a machine has nothing that outlives its process
}
