package manager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/share"
)

const (
	// stopLimit is what containerd's clean-up timeout (5 s, io.containerd.timeout.shim.cleanup) leaves.
	stopLimit = 4 * time.Second
	// graceForShim is for a server that is already on its way out.
	graceForShim = 500 * time.Millisecond
	// killedStatus is the exit status of a container whose end nobody saw: as if by SIGKILL.
	killedStatus = 128 + int(unix.SIGKILL)
)

// Stop undoes whatever is left of a container and says how it ended. containerd calls it after every loss of a
// connection: after a normal shutdown, when there is nothing to do, and after a crash at any point. The working directory
// is a bundle. What can't be undone goes to stderr, which containerd logs; only a bundle that can't be found is an error.
//
// A server that has other containers is asked to end this one, and lives on with its machine. One that has no other, or
// that doesn't answer, is killed: containerd has given it up. The other containers of one that is stalled end with it,
// each by a Stop of its own.
func (m *Manager) Stop(ctx context.Context, id string) (shim.StopStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	bundle, err := bundleOf(id)
	if err != nil {
		return shim.StopStatus{}, err
	}
	s := &stop{Manager: m, id: id, bundle: bundle}
	s.pod, err = bundle.Pod()
	if err == nil {
		s.leavePod(ctx)
	} else if !errors.Is(err, fs.ErrNotExist) { // one that never was in a pod has nothing
		warn(err)
	}
	return s.exit(), nil
}

// bundleOf finds the bundle by where the process was started.
func bundleOf(id string) (record.Bundle, error) {
	cwd, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the bundle: %w", err)
	}
	return record.Bundle(filepath.Join(filepath.Dir(cwd), id)), nil
}

// stop is one Stop under way.
type stop struct {
	*Manager
	id     string
	bundle record.Bundle
	pod    record.Pod
}

// leavePod ends the container's part in its pod, and with the last one the pod.
func (s *stop) leavePod(ctx context.Context) {
	// Held to the end: a second Stop, of this container or another, waits and finds this one's work done.
	unlock, err := s.pod.Lock(ctx)
	switch {
	case errors.Is(err, fs.ErrNotExist): // of the pod nothing is left
		if err := s.undo(ctx); err != nil {
			warn(err)
		}
		return
	case err != nil:
		warn(err)
		return
	}
	defer unlock()
	lives := s.podLives()
	if !lives || !s.askShim(ctx) {
		if err := s.endPod(ctx); err != nil {
			warn(err)
			return
		}
	}
	if err := s.undo(ctx); err != nil {
		warn(err)
		return
	}
	if err := s.pod.Leave(s.id); err != nil {
		warn(err)
	}
	if !lives {
		if err := s.pod.Discard(); err != nil {
			warn(fmt.Errorf("remove the pod's directory: %w", err))
		}
	}
}

// podLives tells whether the pod goes on without this container: others have something that isn't undone, or the machine
// is the pod's own. It doesn't if this is no container, but the pod itself. What can't be read may be so.
func (s *stop) podLives() bool {
	others, err := s.pod.Others(s.id)
	if err != nil {
		warn(err)
		return true
	}
	state, err := s.pod.State()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		warn(err)
		return true
	}
	if state.Sandbox {
		return s.id != state.ID && (len(others) > 0 || !state.Undone)
	}
	return len(others) > 0
}

// endPod makes sure that no server lives, and undoes what it had for the pod, unless another Stop has done so.
func (s *stop) endPod(ctx context.Context) error {
	unlock, err := s.pod.KillShim(ctx, graceForShim)
	if err != nil {
		return fmt.Errorf("end the shim: %w", err)
	}
	defer unlock()
	if address, err := s.pod.Address(); err == nil {
		if err := shim.RemoveSocket(address); err != nil && !errors.Is(err, fs.ErrNotExist) {
			warn(fmt.Errorf("remove the shim's socket: %w", err))
		}
	}
	state, err := s.pod.State() // the server's last
	if errors.Is(err, fs.ErrNotExist) || err == nil && (state.Undone || state.MachineDir == "") {
		return nil
	}
	if err != nil {
		return err
	}
	cfg, err := config.Load(state.ConfigFile)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range state.MachineDirs() {
		errs = append(errs, s.Cleanup(cfg, dir))
	}
	if err := errors.Join(append(errs, s.Sweep(cfg))...); err != nil {
		return err
	}
	if err := state.RemoveDisks(); err != nil {
		return err
	}
	if err := network.New(cfg).Release(ctx, network.Pod{Namespace: state.Namespace, ID: state.ID}); err != nil {
		return fmt.Errorf("detach the pod from the network: %w", err)
	}
	state.Undone = true
	return s.pod.SaveState(state)
}

// undo undoes what the container has had beside the machine.
func (s *stop) undo(ctx context.Context) error {
	state, err := s.bundle.State()
	if errors.Is(err, fs.ErrNotExist) || err == nil && state.Undone {
		return nil
	}
	if err != nil {
		return err
	}
	if state.Share != (share.Record{}) {
		cfg, err := config.Load(state.ConfigFile)
		if err != nil {
			return err
		}
		if err := share.Cleanup(ctx, cfg, state.Share); err != nil {
			return err
		}
	}
	if state.Created {
		err := hooks.Run(ctx, "poststop", state.Poststop, specs.State{ID: state.ID, Status: specs.StateStopped, Bundle: string(s.bundle)})
		if err != nil {
			warn(err)
		}
	}
	state.Undone = true
	return s.bundle.SaveState(state)
}

// exit is the recorded exit, or else that of a killed container; the latter is recorded, so that all agree.
func (s *stop) exit() shim.StopStatus {
	e, err := s.bundle.Exit()
	if err != nil {
		state, _ := s.bundle.State() // a container without one never had a pid
		e = record.Exit{PID: state.PID, Status: uint32(killedStatus), At: time.Now()}
		if err := s.bundle.SaveExit(e); err != nil && !errors.Is(err, fs.ErrNotExist) {
			warn(err)
		}
	}
	return shim.StopStatus{Pid: e.PID, ExitStatus: int(e.Status), ExitedAt: e.At}
}

func warn(err error) { fmt.Fprintln(os.Stderr, err) }
