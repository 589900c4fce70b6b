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

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
)

const (
	// stopLimit is what containerd's clean-up timeout (5 s, io.containerd.timeout.shim.cleanup) leaves.
	stopLimit = 4 * time.Second
	// graceForShim is for a server that is already on its way out.
	graceForShim = 500 * time.Millisecond
	// killedStatus is the exit status of a container whose end nobody saw: as if by SIGKILL.
	killedStatus = 128 + int(unix.SIGKILL)
)

// Stop undoes whatever is left of a container's shim and says how the container ended. containerd calls it after every
// loss of the connection: after a normal shutdown, when there is nothing to do, and after a crash at any point. The
// working directory is the bundle. What can't be undone goes to stderr, which containerd logs; only a bundle that can't
// be read at all is an error.
func (m *Manager) Stop(ctx context.Context, id string) (shim.StopStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	bundle, err := bundleOf(id)
	if err != nil {
		return shim.StopStatus{}, err
	}
	dir := record.Dir(bundle)
	state, err := dir.State()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		warn(err)
	}
	if address, err := shim.ReadAddress(filepath.Join(string(dir), "address")); err == nil {
		if err := shim.RemoveSocket(address); err != nil && !errors.Is(err, fs.ErrNotExist) {
			warn(fmt.Errorf("remove the shim's socket: %w", err))
		}
	}
	m.undo(ctx, dir, &state)
	return exitOf(dir, state), nil
}

// bundleOf finds the bundle by where the process was started.
func bundleOf(id string) (string, error) {
	cwd, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the bundle: %w", err)
	}
	return filepath.Join(filepath.Dir(cwd), id), nil
}

func (m *Manager) undo(ctx context.Context, dir record.Dir, state *record.State) {
	unlock, err := dir.KillShim(ctx, graceForShim)
	if err != nil {
		warn(fmt.Errorf("end the shim: %w", err))
	} else {
		// Held to the end: a second delete waits, and finds everything undone.
		defer unlock()
		if s, err := dir.State(); err == nil {
			*state = s
		}
	}
	if state.ID == "" || state.Undone {
		return
	}
	if state.MachineDir != "" {
		if err := m.cleanMachine(state); err != nil {
			warn(err)
			return
		}
	}
	if state.Created {
		err := hooks.Run(ctx, "poststop", state.Poststop, specs.State{ID: state.ID, Status: specs.StateStopped, Bundle: string(dir)})
		if err != nil {
			warn(err)
		}
	}
	state.Undone = true
	if err := dir.SaveState(*state); err != nil {
		warn(err)
	}
}

func (m *Manager) cleanMachine(state *record.State) error {
	cfg, err := config.Load(state.ConfigFile)
	if err != nil {
		return err
	}
	return errors.Join(m.Cleanup(cfg, state.MachineDir), m.Sweep(cfg))
}

// exitOf is the recorded exit, or else that of a killed container; the latter is recorded, so that all agree.
func exitOf(dir record.Dir, state record.State) shim.StopStatus {
	e, err := dir.Exit()
	if err != nil {
		e = record.Exit{PID: state.PID, Status: uint32(killedStatus), At: time.Now()}
		if err := dir.SaveExit(e); err != nil && !errors.Is(err, fs.ErrNotExist) {
			warn(err)
		}
	}
	return shim.StopStatus{Pid: e.PID, ExitStatus: int(e.Status), ExitedAt: e.At}
}

func warn(err error) { fmt.Fprintln(os.Stderr, err) }
