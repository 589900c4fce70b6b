// Package jail runs a program (QEMU, cube-share) as the least privileged process that can do the work: a uid of its own, no
// capabilities but those about files that it asks for, own namespaces, a read-only root with nothing but the program's own
// files, and the descriptors that it is handed. The launching side is here, what happens inside is package enter and runs
// as cube-jail.
package jail

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail/enter"
)

const (
	// firstFD is the descriptor that the first of Command.Files becomes.
	firstFD = 3
	// maxFiles bounds a command's descriptors where it doesn't say: a machine has a dozen, each disk adds two.
	maxFiles = 1024
)

// Command is a program to run jailed.
type Command struct {
	// Launcher is the path of cube-jail.
	Launcher string
	// Name shows in ps until the program has taken over.
	Name string
	// Root is the directory that becomes the root. It is not written to, but for the mount points proc and dev. With Trees
	// it is any directory: theirs is mounted over it.
	Root string
	// Trees, if there are any, are all that the root has, with proc.
	Trees []Tree
	// Argv is the command; its first element is an absolute path below Root.
	Argv []string
	// Files are handed over as descriptors 3, 4, … and stay the caller's.
	Files []*os.File
	// Tap, when set, is the descriptor that follows Files: a tap in the process's network namespace. See TapFD.
	Tap bool
	// Output gets what the process writes to its standard output and error.
	Output *os.File
	// UID is the host uid and gid.
	UID uint32
	// Cgroup is entered before anything else.
	Cgroup *cgroup.Group
	// NetNS is the path of the network namespace to run in, "" for a new one.
	NetNS string
	// KVM puts /dev/kvm into the jail.
	KVM bool
	// PIDNS gives the process a pid namespace of its own. It must end by itself when what it is connected to has ended: see
	// enter.Spec.
	PIDNS bool
	// Caps are the capabilities that it keeps, of those about files: up to CAP_FSETID.
	Caps []int
	// MaxFiles bounds its descriptors; 0 for 1024.
	MaxFiles uint64
}

// TapFD is the descriptor of the tap.
func (c *Command) TapFD() int { return firstFD + len(c.Files) }

// Process is a jailed process. It dies with the process that started it.
type Process struct {
	pid   int
	done  chan struct{}
	state *os.ProcessState
	err   error
}

// PID is the host pid, of cube-jail and then of what it becomes.
func (p *Process) PID() int { return p.pid }

// Done is closed when the process has ended and has been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Status says how the process ended ("exit status 1", "signal: killed"). Only after Done.
func (p *Process) Status() string {
	if p.state == nil { // somebody else has reaped it
		return fmt.Sprintf("unknown status: %v", p.err)
	}
	return p.state.String()
}

// Killed tells whether SIGKILL ended the process. Only after Done.
func (p *Process) Killed() bool {
	if p.state == nil {
		return false
	}
	ws, ok := p.state.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
}

// Kill ends the process at once. The caller waits for Done.
func (p *Process) Kill() { _ = syscall.Kill(p.pid, syscall.SIGKILL) }

// Start runs the command. Before the process has done anything at all, started is called with its pid; an error ends
// it. A failure inside of the jail shows later, as the end of the process with a line of output.
func (c *Command) Start(started func(pid int) error) (_ *Process, err error) {
	var held undo.Stack // only needed until the child has its own
	defer func() { err = errors.Join(err, held.Release()) }()

	files := slices.Clone(c.Files)
	spec := enter.Spec{
		Parent: os.Getpid(),
		Root:   c.Root,
		UID:    c.UID,
		Argv:   c.Argv,
		KVM:    c.KVM,

		Init:     c.PIDNS,
		Caps:     c.Caps,
		MaxFiles: cmp.Or(c.MaxFiles, maxFiles),
	}
	if c.Tap {
		spec.Tap = c.TapFD()
		files = append(files, nil) // filled by cube-jail
	}
	spec.Keep = firstFD + len(files) - 1
	add := func(f *os.File) (fd int) {
		files = append(files, f)
		return firstFD + len(files) - 1
	}
	for _, t := range c.Trees {
		spec.Trees = append(spec.Trees, enter.Tree{FD: add(t.File), Path: t.Path})
	}
	entry, err := c.Cgroup.Entry()
	if err != nil {
		return nil, err
	}
	held.Push(entry.Close)
	for _, f := range entry.Files {
		spec.Cgroups = append(spec.Cgroups, add(f))
	}
	if c.NetNS != "" {
		ns, err := os.Open(c.NetNS)
		if err != nil {
			return nil, fmt.Errorf("open network namespace: %w", err)
		}
		held.Push(ns.Close)
		spec.NetNS = add(ns)
	}
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	held.Push(in.Close)
	closeOut := func() error { return ignoreClosed(out.Close()) }
	held.Push(closeOut)

	cmd := &exec.Cmd{
		Path:       c.Launcher,
		Args:       []string{c.Launcher, "-name", c.Name},
		Env:        []string{"GOMAXPROCS=1"}, // cube-jail's; spares it finding out, and threads
		Dir:        "/",
		Stdin:      in,
		Stdout:     c.Output,
		Stderr:     c.Output,
		ExtraFiles: files,

		SysProcAttr: &syscall.SysProcAttr{},
	}
	if entry.Into != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(entry.Into.Fd())
	}
	if c.PIDNS {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWPID
	}
	p, err := run(cmd)
	if err != nil {
		return nil, fmt.Errorf("start cube-jail: %w", err)
	}
	if err := started(p.pid); err != nil {
		p.Kill()
		<-p.done
		return nil, err
	}
	// A process that ended early leaves EPIPE here; its own line of output says more.
	if err := send(out, &spec); err != nil && !errors.Is(err, syscall.EPIPE) {
		p.Kill()
		<-p.done
		return nil, fmt.Errorf("instruct cube-jail: %w", err)
	}
	return p, closeOut()
}

func send(w io.Writer, spec *enter.Spec) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// run starts cmd on a thread that lives as long as the process, since the kernel ties the two (PR_SET_PDEATHSIG is
// about the parent's thread), and reaps it there.
func run(cmd *exec.Cmd) (*Process, error) {
	p := &Process{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		p.state = cmd.ProcessState
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Wait returns when the process has ended, or with ctx's error.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
