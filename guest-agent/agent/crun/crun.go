// Package crun drives the OCI runtime in the guest. It is the only place that knows crun's command line and how it
// reports failures.
package crun

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/reap"
)

// state is where crun keeps what it knows of containers.
const state = "/run/crun"

// Error is what crun said why it failed.
type Error struct {
	Op      string
	Message string
}

func (e *Error) Error() string { return e.Message }

// NoCommand tells whether the command to be run doesn't exist or can't be executed.
func (e *Error) NoCommand() bool {
	return strings.Contains(e.Message, "executable file") || strings.HasPrefix(e.Message, "open executable")
}

// Runtime runs crun.
type Runtime struct {
	binary      *os.File
	reaper      *reap.Reaper
	personality uint
}

// New takes crun's binary from path.
func New(path string, r *reap.Reaper) (*Runtime, error) {
	binary, err := seal(path)
	if err != nil {
		return nil, fmt.Errorf("seal %s: %w", path, err)
	}
	return &Runtime{binary: binary, reaper: r, personality: crunPersonality()}, nil
}

// crunPersonality is crun's own; the processes that it starts get theirs from the specification. An emulated CPU
// translates code by address, so that crun and its libraries at random addresses are translated anew each time: that is
// half of the time an exec takes. Real CPUs don't care, and crun keeps its random addresses.
func crunPersonality() uint {
	const addrNoRandomize = 0x0040000 // include/uapi/linux/personality.h
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !bytes.Contains(info, []byte("QEMU TCG CPU")) {
		return 0
	}
	return addrNoRandomize
}

// seal copies a program into memory that nobody can change. A container can get at the program that starts processes in
// it (CVE-2019-5736), so crun, started from anything else, first makes such a copy and executes itself once more, which
// under emulation takes two thirds of its time.
func seal(path string) (_ *os.File, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate(filepath.Base(path), unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if _, err := f.Write(b); err != nil {
		return nil, err
	}
	if err := f.Chmod(0o555); err != nil {
		return nil, err
	}
	// Just these: crun takes no other set for a sealed copy.
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	return f, err
}

// Process is a process to be started in a container, or as its first.
type Process struct {
	// Files are its standard streams when it has no terminal; nil is /dev/null.
	Files [3]*os.File
	// Terminal asks for one.
	Terminal bool
}

// Started is a process that has been started.
type Started struct {
	PID  int
	Exit <-chan reap.Exit // gets one value
	// Terminal is the master side, nil without one.
	Terminal *os.File
}

// Create makes the container of a bundle. Its first process waits for Start. dir is for files that are used meanwhile.
func (r *Runtime) Create(ctx context.Context, id, bundle, dir string, p Process) (*Started, error) {
	return r.launch(ctx, dir, p, []string{"create", "--bundle", bundle}, id)
}

// Exec starts a process, whose description (OCI specs.Process) is in a file, in a container.
func (r *Runtime) Exec(ctx context.Context, id, file, dir string, p Process) (*Started, error) {
	return r.launch(ctx, dir, p, []string{"exec", "--detach", "--process", file}, id)
}

// Start lets a created container's first process go.
func (r *Runtime) Start(ctx context.Context, id, dir string) error {
	return r.run(ctx, dir, [3]*os.File{}, "start", id)
}

// Update changes a container's limits to those in a file (OCI specs.LinuxResources).
func (r *Runtime) Update(ctx context.Context, id, file, dir string) error {
	return r.run(ctx, dir, [3]*os.File{}, "update", "--resources", file, id)
}

// Delete removes a container and kills what is left of it. It is no error when there is no such container.
func (r *Runtime) Delete(ctx context.Context, id, dir string) error {
	if _, err := os.Stat(filepath.Join(state, id)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return r.run(ctx, dir, [3]*os.File{}, "delete", "--force", id)
}

// launch runs a command that leaves a process behind, which PID 1 inherits.
func (r *Runtime) launch(ctx context.Context, dir string, p Process, command []string, id string) (_ *Started, err error) {
	pidFile := filepath.Join(dir, "pid")
	command = append(command, "--pid-file", pidFile)
	defer os.Remove(pidFile)
	s := &Started{}
	var console *console
	if p.Terminal {
		if console, err = listenConsole(filepath.Join(dir, "console")); err != nil {
			return nil, err
		}
		defer console.close()
		command = append(command, "--console-socket", console.path)
	}
	e := r.reaper.Expect()
	defer e.Done()
	if err := r.run(ctx, dir, p.Files, append(command, id)...); err != nil {
		return nil, err
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return nil, fmt.Errorf("crun %s left no pid: %w", command[0], err)
	}
	if s.PID, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil || s.PID <= 1 {
		return nil, fmt.Errorf("crun %s left %q as its pid", command[0], b)
	}
	s.Exit = e.Claim(s.PID)
	if console != nil {
		// crun has sent it before it ended.
		if s.Terminal, err = console.receive(); err != nil {
			return nil, fmt.Errorf("receive the terminal: %w", err)
		}
	}
	return s, nil
}

func (r *Runtime) run(ctx context.Context, dir string, files [3]*os.File, args ...string) error {
	log := filepath.Join(dir, "log")
	defer os.Remove(log)
	exit, err := r.reaper.Run(ctx, reap.Command{
		Path: fmt.Sprintf("/proc/self/fd/%d", r.binary.Fd()),
		Args: append([]string{"--root", state, "--cgroup-manager", "cgroupfs", "--log", log, "--log-format", "json"}, args...),
		// crun looks for nothing of its own in the environment, and a container inherits none of it.
		Dir:         dir,
		Files:       files,
		Personality: r.personality,
	})
	switch {
	case err != nil:
		return fmt.Errorf("crun %s: %w", args[0], err)
	case exit.Status != 0:
		return &Error{Op: args[0], Message: lastError(log, exit.Status)}
	}
	return nil
}

// lastError returns what crun logged before it failed, in one line.
func lastError(log string, status uint32) string {
	b, _ := os.ReadFile(log)
	message := ""
	for line := range strings.Lines(string(b)) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Level == "error" {
			message = entry.Msg
		}
	}
	if message == "" {
		return fmt.Sprintf("crun ended with status %d and said nothing", status)
	}
	return strings.Join(strings.Fields(message), " ")
}
