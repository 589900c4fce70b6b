// Package server is what the shim's server process consists of, as plugins of containerd's shim library: the pod, and the
// services by which containerd asks for it.
package server

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/attach"
	"github.com/cubesandbox/cube/shim/manager"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/sandbox"
	"github.com/cubesandbox/cube/shim/snapshots"
	"github.com/cubesandbox/cube/shim/task"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// pkg/shim gives a server 5 s to end.
const (
	podLimit    = 3 * time.Second
	eventsLimit = 1500 * time.Millisecond
)

// forgottenLimit is more than containerd takes from the last deletion to the end of the shim.
const forgottenLimit = 5 * time.Second

// Machines is where machines come from.
type Machines struct {
	// Launcher returns the maker of machines for a configuration.
	Launcher func(*config.Config, *slog.Logger) vmm.Launcher
	// Cleanup undoes all that a machine's directory stands for, and removes it.
	Cleanup func(cfg *config.Config, machineDir string) error
}

// podPlugin is the type of what the services require. A plugin can't require one of its own type.
const podPlugin plugin.Type = "io.cube.pod.v1"

// Register makes the pod and its services plugins of the shim's server process.
func Register(m Machines) {
	registry.Register(&plugin.Registration{
		Type:     podPlugin,
		ID:       "pod",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn:   func(ic *plugin.InitContext) (any, error) { return load(ic, m) },
	})
	serve("task", func(s *served) any { return task.NewService(s.pod, s.shutdown, s.log, s.socket) })
	serve("snapshots", func(s *served) any { return snapshots.NewService(s.pod, s.log) })
	serve("sandbox", func(s *served) any { return sandbox.NewService(s.pod, s.config, s.shutdown, s.log, s.socket) })
}

// serve registers one of the services.
func serve(id string, service func(*served) any) {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       id,
		Requires: []plugin.Type{podPlugin},
		InitFn: func(ic *plugin.InitContext) (any, error) {
			s, err := ic.GetSingle(podPlugin)
			if err != nil {
				return nil, err
			}
			return service(s.(*served)), nil
		},
	})
}

// served is what the services have in common.
type served struct {
	pod      *pod.Pod
	config   string // the file of a sandbox's configuration, "" for the default one
	shutdown shutdown.Service
	log      *slog.Logger
	socket   string
}

func load(ic *plugin.InitContext, m Machines) (any, error) {
	manager.CloseOnExec()
	publisher, err := ic.GetByID(plugins.EventPlugin, "publisher")
	if err != nil {
		return nil, err
	}
	sd, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
	if err != nil {
		return nil, err
	}
	namespace, err := namespaces.NamespaceRequired(ic.Context)
	if err != nil {
		return nil, err
	}
	bundle, err := os.Getwd() // of the container that the process was started for
	if err != nil {
		return nil, err
	}
	dir, err := record.Bundle(bundle).Pod()
	if err != nil {
		return nil, fmt.Errorf("find the pod's directory: %w", err)
	}
	state, err := dir.State()
	if err != nil {
		return nil, err
	}
	logger := openLog(os.Stderr)
	to := publisher.(shim.Publisher)
	events := pod.NewEvents(namespace, to, logger)
	p := pod.New(pod.Env{
		ID:        state.ID,
		Namespace: namespace,
		Dir:       dir,
		Events:    events,
		Log:       logger,
		Launcher:  func(cfg *config.Config) vmm.Launcher { return m.Launcher(cfg, logger) },
		Cleanup:   m.Cleanup,
		Snapshots: func(cfg *config.Config) *snapshot.Store { return snapshot.New(cfg, logger) },
		Network:   attach.Network{},
	})
	shutdown := sd.(shutdown.Service)
	shutdown.RegisterCallback(func(ctx context.Context) error {
		within(ctx, podLimit, func(ctx context.Context) {
			if err := p.Close(ctx); err != nil {
				logger.Error("end the pod", "error", err)
			}
		})
		within(ctx, eventsLimit, func(ctx context.Context) {
			if err := events.Close(ctx); err != nil {
				logger.Error("publish the last events", "error", err)
			}
		})
		return to.Close()
	})
	s := &served{pod: p, config: state.ConfigFile, shutdown: shutdown, log: logger, socket: socketPath()}
	go s.endForgotten()
	return s, nil
}

// endForgotten ends a shim that has nothing and that nobody tells to end. containerd then cleans up after it, as after
// any that is gone.
func (s *served) endForgotten() {
	hide := func() { os.Remove(s.socket) } // `shim delete` tries again
	if s.pod.AwaitForgotten(forgottenLimit, hide) {
		s.log.Warn("the shim ends by itself: it has nothing, and nobody has told it to end")
		s.shutdown.Shutdown()
	}
}

func within(ctx context.Context, limit time.Duration, f func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	f(ctx)
}

// socketPath is the path of the socket that this process was given to listen on, "" if it has none.
func socketPath() string {
	addr, err := unix.Getsockname(manager.ListenerFD)
	if err != nil {
		return ""
	}
	if u, ok := addr.(*unix.SockaddrUnix); ok {
		return u.Name
	}
	return ""
}
