// Package stack runs Cube on one machine: the store, the snapshotter, a containerd of its own or an existing one, the
// sandboxes' network, the proof of the accelerator and the base snapshot of the default machine, each waited for until it
// can be used. It owns the daemons and never a machine: those belong to their shims and outlive it, and so does their network.
package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	network "github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/e2b"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/ingress/keeper"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/base"
)

const (
	// probeTimeout bounds each probe of a readiness report.
	probeTimeout = 2 * time.Second
	// answerTimeout bounds how long the last answers on the control socket may take when the stack ends.
	answerTimeout = 2 * time.Second
	// portTimeout bounds how long the last owner of a port is waited for.
	portTimeout = 2 * time.Second
)

// Options are how Up and Down talk to their caller.
type Options struct {
	Log *slog.Logger
	// Version is this program's, for the readiness report.
	Version string
	// Progress is told what is being waited for; the function it returns is called when that has ended.
	Progress func(what string) (done func())
	// Ready is called once, when all parts can be used, with a line for people.
	Ready func(summary string)
}

// stack is a running Up.
type stack struct {
	Options
	cfg   *config.Config
	board *health.Board
	// notify tells a service manager.
	notify notifier
	undo   undo.Stack
	// group is what runs beside Up, and life ends with it: when the caller's context does, or one of the group fails.
	group *errgroup.Group
	life  context.Context

	launcher   *base.Launcher
	network    *network.Daemon
	api        *api.Service
	audit      *audit.Log
	db         *db.DB
	engine     *lifecycle.Engine
	builds     *builds.Service
	proxy      atomic.Pointer[keeper.Keeper] // once it is started
	e2b        *e2b.Server
	metrics    *prometheus.Registry // that the E2B API serves
	since      time.Time            // nothing of before runs
	full       chan struct{}        // the store is, whatever machines have done about it
	containerd string               // containerd's version
	verdict    accel.Verdict
}

// part is one thing that must be ready. start returns when it is; it may take ReadyTimeout.
type part struct {
	name  string
	start func(ctx context.Context) error
}

// Up runs the stack until ctx ends, when it stops the daemons that it owns, or until one of them is beyond help. A part
// that doesn't become ready ends it with an error that names the part, and nothing is left.
func Up(ctx context.Context, cfg *config.Config, o Options) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("the stack needs root: use sudo")
	}
	s := &stack{Options: o, cfg: cfg, network: network.New(cfg, o.Log.With("part", "network")), launcher: base.NewLauncher(cfg, guest.Settle(cfg.Timeout), o.Log.With("part", "machines")),
		api: api.New(cfg, o.Log.With("part", "api")), full: make(chan struct{}, 1)}
	if s.notify, err = takeNotifier(o.Log); err != nil {
		return err
	}
	parts := []part{
		{"artefacts", s.checkArtefacts},
		{"store", s.startStore},
		{"snapshotter", s.startSnapshotter},
		{"containerd", s.startContainerd},
		{"network", s.startNetwork},
		{"accelerator", s.proveAccelerator},
		{"base snapshot", s.warmBase},
		{"api", s.openAPI},
		{"sandboxes", s.openSandboxes},
		{"proxy", s.startProxy},
		{"E2B API", s.openE2B},
	}
	names := make([]string, len(parts))
	for i, p := range parts {
		names[i] = p.name
	}
	s.board = health.NewBoard(o.Version, os.Getpid(), cfg.Timeout(probeTimeout), names...)

	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.group, s.life = errgroup.WithContext(life)
	// The operations under way need all else until they have ended. The group's functions end when life does; what they use is
	// released after them.
	stop := context.AfterFunc(ctx, func() {
		s.api.Close()
		cancel()
	})
	defer func() {
		stop()
		s.api.Close()
		cancel()
		if gerr := s.group.Wait(); gerr != nil {
			err = gerr // which is why the rest has ended
		}
		err = errors.Join(err, s.undo.Release())
	}()
	if err := s.claim(); err != nil {
		return err
	}
	if err := s.openAudit(); err != nil {
		return err
	}
	if err := s.serveControl(); err != nil {
		return err
	}
	if err := s.serveE2B(s.life); err != nil {
		return err
	}
	for _, p := range parts {
		if err := s.bring(p); err != nil {
			return err
		}
	}
	s.group.Go(func() error { s.keepRoom(); return nil })
	s.Log.Info("ready", "containerd", s.containerd, "accelerator", s.verdict.Kind)
	s.Ready(fmt.Sprintf("ready: containerd %s at %s, machines under %s, %s; E2B's API at http://%s, sandboxes at %s", s.containerd, cfg.ContainerdSocket(), s.verdict.Kind, s.network.Summary(),
		cfg.API.Listen, cfg.Proxy.Authority()))
	s.notify.tell("READY=1", "STATUS=ready: machines under "+string(s.verdict.Kind))
	<-s.life.Done()
	s.notify.tell("STOPPING=1", "STATUS=stopping; running sandboxes go on")
	s.Log.Info("stopping; running sandboxes go on")
	return nil
}

// claim makes the directories and takes the run directory for this process.
func (s *stack) claim() error {
	for _, dir := range []string{s.cfg.StateDir, s.cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	l, err := acquire(s.cfg)
	if err != nil {
		return err
	}
	s.undo.Push(l.release)
	s.since, err = l.since()
	return err
}

// serveControl answers on the control socket, so that readiness can be asked for from the start.
func (s *stack) serveControl() error {
	path := s.cfg.ControlSocket()
	l, err := listenUnix(path)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/", health.Handler(s.board))
	mux.Handle("/network/", s.network)
	mux.Handle(api.Root, s.api.Handler())
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	s.group.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve %s: %w", path, err)
		}
		return nil
	})
	s.group.Go(func() error {
		<-s.life.Done()
		ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout(answerTimeout))
		defer cancel()
		_ = srv.Shutdown(ctx) // removes the socket, too; who doesn't take his answer in time has none
		return srv.Close()
	})
	return nil
}

// listenUnix makes a socket that is only root's. A stale one is replaced: who calls holds the run directory.
func listenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at %s: %w", path, err), l.Close())
	}
	return l, nil
}

// bring starts a part and waits until it is ready.
func (s *stack) bring(p part) error {
	limit := s.cfg.Timeout(time.Duration(s.cfg.ReadyTimeout))
	ctx, cancel := context.WithTimeout(s.life, limit)
	defer cancel()
	defer s.Progress(p.name)()
	s.notify.tell("STATUS=waiting for " + p.name)
	started := time.Now()
	err := p.start(ctx)
	switch {
	case err == nil:
		s.board.Set(p.name, health.Ready, "")
		s.Log.Info("part is ready", "part", p.name, "after", time.Since(started).Round(time.Millisecond))
		return nil
	case s.life.Err() != nil:
		return fmt.Errorf("interrupted while waiting for %s", p.name)
	case ctx.Err() != nil:
		err = fmt.Errorf("%s isn't ready after %v (ready_timeout; on a slow or busy host try CUBE_TIMEOUT_SCALE=3): %w", p.name, limit, err)
	default:
		err = fmt.Errorf("%s: %w", p.name, err)
	}
	s.board.Set(p.name, health.Failed, err.Error())
	return err
}

// checkArtefacts makes sure that there is something to make machines of, and that it stays.
func (s *stack) checkArtefacts(context.Context) error {
	for _, f := range []struct{ what, path string }{
		{"QEMU", filepath.Join(s.cfg.QEMUDir(), "usr/bin/qemu-system-x86_64")},
		{"guest kernel", filepath.Join(s.cfg.GuestDir(), "vmlinuz")},
		{"guest initramfs", filepath.Join(s.cfg.GuestDir(), "initrd.img")},
		{"guest modules image", filepath.Join(s.cfg.GuestDir(), "modules.img")},
	} {
		if _, err := os.Stat(f.path); err != nil {
			return fmt.Errorf("no %s: %w; `make setup` makes it, or set artefacts to where it is", f.what, err)
		}
	}
	return artefact.Register(s.cfg.Artefacts, s.cfg.StateDir)
}
