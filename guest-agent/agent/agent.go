// Package agent is PID 1 of a machine: it makes a system of the initramfs, and serves the host over the agent channel
// until the machine ends.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/boot"
	"github.com/cubesandbox/cube/guest-agent/agent/container"
	"github.com/cubesandbox/cube/guest-agent/agent/crun"
	"github.com/cubesandbox/cube/guest-agent/agent/events"
	"github.com/cubesandbox/cube/guest-agent/agent/network"
	"github.com/cubesandbox/cube/guest-agent/agent/port"
	"github.com/cubesandbox/cube/guest-agent/agent/reap"
	"github.com/cubesandbox/cube/guest-agent/agent/server"
	"github.com/cubesandbox/cube/guest-agent/agent/tools"
	"github.com/cubesandbox/cube/guest-agent/agent/volumes"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

const (
	// portName is what the machine calls the channel to the host.
	portName = "cube.agent"
	// nic is what the kernel calls the machine's one network card.
	nic = "eth0"
	// portTimeout bounds the wait for the channel's device, which is there before PID 1 starts.
	portTimeout = time.Minute
	crunPath    = "/usr/bin/crun"
	containers  = "/run/cube/containers"
	sharedMem   = "/run/cube/shm"
	toolsDir    = "/run/cube/tools"
	// farewell bounds what is done for the containers when the host is gone.
	farewell = 30 * time.Second
)

// Run boots the guest and serves the host. Only for PID 1. It returns when there is no way to go on.
func Run(version string) error {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey && len(groups) == 0 { // the console is slow
				return slog.Attr{}
			}
			return a
		},
	})))
	fatal, failed := boot.Run()
	if fatal != nil {
		return fmt.Errorf("boot: %w", fatal)
	}
	if failed != nil {
		slog.Warn("boot is incomplete", "error", oneLine(failed))
	}
	ctx, cancel := context.WithTimeout(context.Background(), portTimeout)
	defer cancel()
	channel, err := port.Open(ctx, portName)
	if err != nil {
		return err
	}
	runtime, err := crun.New(crunPath, reap.New())
	if err != nil {
		return err
	}
	log, card := events.NewLog(), network.NewCard(nic)
	programs := &tools.Tools{Dir: toolsDir}
	manager, err := container.NewManager(container.Config{
		Dir:     containers,
		Cgroups: boot.Cgroups,
		Shm:     &volumes.Shm{Dir: sharedMem},
		Tools:   programs,
		Crun:    runtime,
		Events:  log,

		ResolvConf: card.ResolvConf,
	})
	if err != nil {
		return err
	}
	guest := &server.Guest{Containers: manager, Card: card, Events: log, Tools: programs, Version: version, PowerOff: powerOff}
	if err := mux.Serve(channel, guest.Serve); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("serve the host: %w", err)
	}
	slog.Error("the host has closed the channel; shutting down")
	leave(manager)
	return nil
}

// leave ends a machine that nobody can reach any more, without loss of what its workload has written.
func leave(m *container.Manager) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	if err := m.Leave(ctx); err != nil {
		slog.Error("containers may have lost data", "error", oneLine(err))
	}
	unix.Sync()
	powerOff()
}

// powerOff ends the machine. A microVM has nothing that could switch it off; a reset is what ends it, and the host takes
// care that nothing starts again.
func powerOff() {
	err := unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	slog.Error("the machine can't be ended", "error", err)
	os.Exit(1) // a panic of the kernel's, then
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
