package shim

import (
	"context"

	"github.com/containerd/containerd/v2/pkg/shim"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/manager"
	"github.com/cubesandbox/cube/shim/server"
)

// runtimeName is the name that containerd knows the shim by.
const runtimeName = "io.cube.v2"

// Run is the shim's binary: what containerd asks for by an action, or the server process. sweep cleans up after all
// machines whose owners are gone. It returns when the server has been told to end, and exits the process on errors.
func Run(m server.Machines, sweep func(*config.Config) error) {
	server.Register(m)
	shim.RunShim(context.Background(), &manager.Manager{Runtime: runtimeName, Cleanup: m.Cleanup, Sweep: sweep}, func(c *shim.Config) {
		// The children are waited for one by one; a reaper would take their statuses away.
		c.NoReaper, c.NoSubreaper = true, true
	})
}
