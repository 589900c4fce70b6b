package fake

import (
	"context"
	"net"

	"github.com/cubesandbox/cube/internal/hostile"
)

// serveHostile has the hostile agent serve instead of the good one, until the machine ends.
func (m *Machine) serveHostile(conn net.Conn, mode string) {
	defer conn.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-m.done:
		case <-ctx.Done():
		}
		cancel()
	}()
	agent := &hostile.Agent{Mode: mode, Die: func() { m.Crash("kernel panic") }}
	agent.Serve(ctx, conn) // ends with the machine, or when the host has had enough
}
