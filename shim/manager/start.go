// Package manager is what the shim's binary does when containerd calls it by an action: start makes the server process,
// delete ends and undoes whatever a server that is no more has left, info describes the runtime. It knows nothing of
// tasks; the server process itself is package task.
package manager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/containerd/v2/pkg/shim"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/record"
)

// The descriptors that the server process inherits.
const (
	// ListenerFD is the one that pkg/shim serves on.
	ListenerFD = 3
	// LockFD is the bundle's lock, held as long as the server lives.
	LockFD = 4
)

// CloseOnExec keeps the inherited descriptors from the server's own children. The server calls it first of all.
func CloseOnExec() {
	unix.CloseOnExec(ListenerFD)
	unix.CloseOnExec(LockFD)
}

// Manager implements pkg/shim's Shim.
type Manager struct {
	// Runtime is the runtime's name.
	Runtime string
	// Cleanup undoes all that a machine's directory stands for, and removes the directory. It is idempotent and
	// takes at most a few seconds.
	Cleanup func(cfg *config.Config, machineDir string) error
	// Sweep does the same for all machines whose owners are gone: a shim that is killed may also have been making a
	// base snapshot.
	Sweep func(cfg *config.Config) error
}

var _ shim.Shim = (*Manager)(nil)

// Name is the runtime's name.
func (m *Manager) Name() string { return m.Runtime }

// Start starts the server process for a container and tells containerd where it listens. The working directory is the
// bundle. It is on the way of every container's start, so it does nothing that the server can do.
func (m *Manager) Start(ctx context.Context, params *bootapi.BootstrapParams) (_ *bootapi.BootstrapResult, err error) {
	// The server reads it again; here a mistake in it can still reach the user as an error of start.
	if _, err := config.Load(""); err != nil {
		return nil, err
	}
	bundle, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	socketDir := params.GetSocketDir()
	if socketDir == "" {
		socketDir = filepath.Join(defaults.DefaultStateDir, "s")
	}
	// One machine serves one container, so the container's id is what a shim is found by.
	address, err := shim.CreateSocketAddress(ctx, socketDir, params.GetContainerdGrpcAddress(), params.GetInstanceID(), false)
	if err != nil {
		return nil, err
	}

	var u undo.Stack
	defer u.Run(&err)

	lock, err := record.Dir(bundle).Lock()
	if errors.Is(err, record.ErrAlive) && shim.CanConnect(address) {
		return m.result(address)
	}
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	listener, err := listen(address)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	u.Push(func() error { return shim.RemoveSocket(address) })
	if err := os.WriteFile(filepath.Join(bundle, "address"), []byte(address), 0o600); err != nil {
		return nil, err
	}

	cmd, err := server(params, bundle)
	if err != nil {
		return nil, err
	}
	cmd.ExtraFiles = []*os.File{listener, lock}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the server process: %w", err)
	}
	u.Push(cmd.Process.Kill)
	if err := record.WritePID(lock, cmd.Process.Pid); err != nil {
		return nil, fmt.Errorf("write the shim's pid: %w", err)
	}
	// A process without CAP_SYS_RESOURCE may not change the score; then the shim keeps its parent's.
	if err := shim.AdjustOOMScore(cmd.Process.Pid); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return nil, err
	}
	return m.result(address)
}

// result says where the server listens, and which of containerd's mounts need not be made for it.
func (m *Manager) result(address string) (*bootapi.BootstrapResult, error) {
	r := &bootapi.BootstrapResult{Version: 3, Address: address, Protocol: "ttrpc"}
	err := r.AddExtension(&types.MountCapabilities{
		// Images of these are plugged into the machine and mounted there, never on the host.
		Types: []string{"ext4", "xfs", "erofs", "squashfs", "loop"},
		// mkfs stays with containerd: it owns the file.
		Transforms: []string{"format", "mkdir"},
	})
	return r, err
}

// listen makes the socket, in place of one that nobody listens on any more.
func listen(address string) (*os.File, error) {
	l, err := shim.NewSocket(address)
	if shim.SocketEaddrinuse(err) {
		if shim.CanConnect(address) {
			return nil, fmt.Errorf("another process listens on %s", address)
		}
		if err := shim.RemoveSocket(address); err != nil {
			return nil, fmt.Errorf("remove the socket of an earlier shim: %w", err)
		}
		l, err = shim.NewSocket(address)
	}
	if err != nil {
		return nil, fmt.Errorf("create the shim's socket: %w", err)
	}
	defer l.Close()
	l.SetUnlinkOnClose(false) // the server goes on listening
	return l.File()
}

// server is the command of the process that serves tasks: this binary without an action.
func server(params *bootapi.BootstrapParams, bundle string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{
		"-namespace", params.GetNamespace(),
		"-id", params.GetInstanceID(),
		"-address", params.GetContainerdGrpcAddress(),
	}
	if params.GetLogLevel() <= bootapi.LogLevel_LOG_LEVEL_DEBUG {
		args = append(args, "-debug")
	}
	cmd := exec.Command(self, args...)
	cmd.Dir = bundle
	// A group of its own: signals for containerd's group are not for it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, nil
}
