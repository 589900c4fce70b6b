// Command hostile-agent is the init of a machine whose guest has been taken over; see internal/hostile. It is in no image
// but the one that the test of this directory makes.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/cubesandbox/cube/guest-agent/agent/boot"
	"github.com/cubesandbox/cube/guest-agent/agent/port"
	"github.com/cubesandbox/cube/internal/hostile"
)

const (
	// portName is what the machine calls the channel to the host.
	portName    = "cube.agent"
	portTimeout = time.Minute
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "hostile-agent is the init of a test's virtual machine; it can't be run by hand")
		os.Exit(2)
	}
	// The end of PID 1 is the kernel's panic.
	fmt.Fprintln(os.Stderr, "hostile-agent:", run())
	os.Exit(1)
}

func run() error {
	if fatal, _ := boot.Run(); fatal != nil {
		return fatal
	}
	ctx, cancel := context.WithTimeout(context.Background(), portTimeout)
	defer cancel()
	channel, err := port.Open(ctx, portName)
	if err != nil {
		return err
	}
	agent := &hostile.Agent{Die: func() { os.Exit(1) }}
	return agent.Serve(context.Background(), channel)
}
