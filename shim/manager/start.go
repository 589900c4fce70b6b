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
	"time"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/containerd/v2/pkg/shim"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/spec"
)

// The descriptors that the server process inherits.
const (
	// ListenerFD is the one that pkg/shim serves on.
	ListenerFD = 3
	// LockFD is the lock of the pod's shim, held as long as the server lives.
	LockFD = 4
)

// startLimit bounds the wait for a shim of the pod that is on its way out; pkg/shim gives it 5 s.
const startLimit = 8 * time.Second

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

// Start tells containerd where the server process for a container listens: that of the container's pod if there is one,
// or else one that it starts. The working directory is the bundle. It is on the way of every container's start, so it does
// nothing that the server can do.
func (m *Manager) Start(ctx context.Context, params *bootapi.BootstrapParams) (_ *bootapi.BootstrapResult, err error) {
	// The server reads it again; here a mistake in it can still reach the user as an error of start.
	cfg, err := config.Load("")
	if err != nil {
		return nil, err
	}
	bundle, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	id, err := spec.Group(bundle)
	if err != nil {
		return nil, err
	}
	if id == "" {
		id = params.GetInstanceID()
	}
	address, err := socketAddress(ctx, params, id)
	if err != nil {
		return nil, err
	}
	pod := podOf(cfg, address)

	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(startLimit))
	defer cancel()
	unlock, err := pod.Make(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	var u undo.Stack
	defer u.Run(&err)
	lock, err := pod.LockShim()
	if errors.Is(err, record.ErrAlive) && !shim.CanConnect(address) {
		// Its last container has been deleted. Until it is gone, the address is its own.
		if err := pod.AwaitShim(ctx); err != nil {
			return nil, err
		}
		lock, err = pod.LockShim()
	}
	alive := errors.Is(err, record.ErrAlive)
	if err != nil && !alive {
		return nil, err
	}
	if !alive {
		defer lock.Close()
		u.Push(pod.Discard)
	}
	if err := pod.Join(params.GetInstanceID(), record.Bundle(bundle)); err != nil {
		return nil, err
	}
	u.Push(func() error { return pod.Leave(params.GetInstanceID()) })
	if !alive {
		if err := m.serve(params, pod, id, address, lock); err != nil {
			return nil, err
		}
	}
	return m.result(address)
}

// serve starts the server process, which inherits the lock.
func (m *Manager) serve(params *bootapi.BootstrapParams, pod record.Pod, id, address string, lock *os.File) (err error) {
	var u undo.Stack
	defer u.Run(&err)
	if s, err := pod.State(); err != nil || s.MachineDir == "" || s.Undone { // else it says what to clean up
		file, err := configFile(params, pod, id)
		if err != nil {
			return err
		}
		if err := pod.SaveState(record.PodState{ID: id, Namespace: params.GetNamespace(), ConfigFile: file}); err != nil {
			return err
		}
	}
	listener, err := listen(address)
	if err != nil {
		return err
	}
	defer listener.Close()
	u.Push(func() error { return shim.RemoveSocket(address) })
	if err := pod.SaveAddress(address); err != nil {
		return err
	}
	cmd, err := server(params, id)
	if err != nil {
		return err
	}
	cmd.ExtraFiles = []*os.File{listener, lock}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the server process: %w", err)
	}
	u.Push(cmd.Process.Kill)
	if err := record.WritePID(lock, cmd.Process.Pid); err != nil {
		return fmt.Errorf("write the shim's pid: %w", err)
	}
	// A process without CAP_SYS_RESOURCE may not change the score; then the shim keeps its parent's.
	if err := shim.AdjustOOMScore(cmd.Process.Pid); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return err
	}
	return nil
}

// configFile is the configuration that the runtime's options name or have, "" for the default one. It is a sandbox's;
// requests for containers come with options of their own.
func configFile(params *bootapi.BootstrapParams, pod record.Pod, id string) (string, error) {
	o := &runtimeoptions.Options{}
	if _, err := params.FindExtension(o); err != nil {
		return "", err
	}
	if o.ConfigPath == "" && len(o.ConfigBody) > 0 {
		return pod.SaveConfig(id, o.ConfigBody)
	}
	return o.ConfigPath, nil
}

// socketAddress is where the server of a pod listens: by the pod's id in its namespace of one containerd.
func socketAddress(ctx context.Context, params *bootapi.BootstrapParams, id string) (string, error) {
	dir := params.GetSocketDir()
	if dir == "" {
		dir = filepath.Join(defaults.DefaultStateDir, "s")
	}
	return shim.CreateSocketAddress(ctx, dir, params.GetContainerdGrpcAddress(), id, false)
}

// podOf is the directory of the pod whose server listens there. The socket's name is a hash; a part of it is enough.
func podOf(cfg *config.Config, address string) record.Pod {
	const digits = 16
	name := filepath.Base(address)
	return record.Pod(filepath.Join(cfg.PodDir(), name[:min(len(name), digits)]))
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

// server is the command of the process that serves a pod's tasks: this binary without an action.
func server(params *bootapi.BootstrapParams, id string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{
		"-namespace", params.GetNamespace(),
		"-id", id, // pkg/shim removes the socket of that id in the end
		"-address", params.GetContainerdGrpcAddress(),
	}
	if params.GetLogLevel() <= bootapi.LogLevel_LOG_LEVEL_DEBUG {
		args = append(args, "-debug")
	}
	cmd := exec.Command(self, args...) // in the bundle, where it finds its pod and its log
	// A group of its own: signals for containerd's group are not for it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, nil
}
