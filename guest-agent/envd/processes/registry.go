// Package processes starts commands as users, with pipes or a terminal, and keeps them until they end: their output goes to
// whoever is subscribed, and nobody's absence ends them. Service serves this to SDKs.
package processes

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
	"github.com/cubesandbox/cube/internal/undo"
)

// remembered is how long one can still ask how a process ended.
const remembered = 30 * time.Second

// defaultPath is PATH where envd has none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Spec is a command.
type Spec struct {
	User    users.User
	Command string
	Args    []string
	Env     map[string]string // added to the sandbox's
	Dir     string            // as it was asked for
	HasDir  bool
	Tag     *string
	Size    *Size // set: a terminal
	NoInput bool
	Log     bool          // the output is in Registry.Log, too
	Whole   bool          // what it has left when it ends is killed
	Timeout time.Duration // 0: none
}

// Registry has the processes.
type Registry struct {
	Settings *settings.Store
	// Environ is what each process starts from, as os.Environ. HOME, USER and LOGNAME are the user's.
	Environ []string
	// Commands and Terminals are the control groups of processes; nil: envd's.
	Commands, Terminals *os.File
	// Log gets the output of commands that are to be logged.
	Log *slog.Logger

	mu  sync.Mutex
	all map[uint32]*Process // those that run, and those that ended a short while ago
}

// Start starts a command. The subscription gets its output from the first byte. The error is errdefs.ErrInvalidArgument where
// there is no such command or directory.
func (r *Registry) Start(spec Spec) (_ *Process, _ *Subscription, err error) {
	cmd, err := r.command(spec)
	if err != nil {
		return nil, nil, err
	}
	p := &Process{
		Spec: spec, hub: hub{over: make(chan struct{})}, cmd: cmd, writer: make(chan struct{}, 1),
		cut: make(chan struct{}), late: make(chan struct{}), done: make(chan struct{}),
	}
	var open undo.Stack
	defer open.Run(&err)
	outputs, theirs, err := p.connect(&open)
	if err != nil {
		return nil, nil, err
	}
	if err := p.makeOwn(r.group(spec), &open); err != nil {
		return nil, nil, err
	}
	err = cmd.Start()
	for _, f := range theirs {
		f.Close()
	}
	if err != nil {
		return nil, nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("start %s: %v", spec.Command, cause(err)))
	}
	p.PID = uint32(cmd.Process.Pid)
	p.protectOthers()
	sub := p.Subscribe()
	if spec.Log {
		go p.log(p.Subscribe(), r.Log)
	}
	r.add(p)
	go p.watch(outputs)
	return p, sub, nil
}

// cause is an error without Go's "fork/exec path:".
func cause(err error) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		return e.Err
	}
	return err
}

func (r *Registry) command(spec Spec) (*exec.Cmd, error) {
	s := r.Settings.Get()
	env := r.environ(spec, s)
	dir := s.Workdir
	if spec.HasDir && spec.Dir != "" {
		dir = spec.Dir
	}
	dir, err := spec.User.Resolve(dir, "")
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("cwd %s is not a directory of this sandbox", dir))
	}
	path, err := users.FindCommand(spec.Command, dir, env["PATH"])
	if err != nil {
		return nil, err
	}
	for _, a := range append([]string{spec.Command}, spec.Args...) {
		if strings.ContainsRune(a, 0) {
			return nil, errdefs.ErrInvalidArgument.WithMessage("cmd or args have a zero byte")
		}
	}
	cmd := &exec.Cmd{Path: path, Args: append([]string{spec.Command}, spec.Args...), Dir: dir}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		cmd.Env = append(cmd.Env, name+"="+env[name])
	}
	// A session of its own: what it starts can be told from envd's.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{
		Uid: spec.User.UID, Gid: spec.User.GID, Groups: spec.User.Groups,
	}}
	cmd.SysProcAttr.Setctty = spec.Size != nil
	if group := r.group(spec); group != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	return cmd, nil
}

// group is the control group of a command, nil for envd's.
func (r *Registry) group(spec Spec) *os.File {
	if spec.Size != nil {
		return r.Terminals
	}
	return r.Commands
}

// environ is a process's: envd's, the user, what /init gave, what the request asks for; the last wins.
func (r *Registry) environ(spec Spec, s settings.Settings) map[string]string {
	env := map[string]string{"PATH": defaultPath}
	for _, v := range r.Environ {
		if name, value, ok := strings.Cut(v, "="); ok && name != "" {
			env[name] = value
		}
	}
	env["HOME"], env["USER"], env["LOGNAME"] = spec.User.Home, spec.User.Name, spec.User.Name
	maps.Copy(env, s.Environ())
	maps.Copy(env, spec.Env)
	return env
}

// connect makes the process's stdio: what is read of it here, and its own ends, which are closed here once it runs.
func (p *Process) connect(open *undo.Stack) (outputs map[Stream]*os.File, theirs []*os.File, err error) {
	keep := func(f *os.File) *os.File {
		open.Push(func() error { _ = f.Close(); return nil })
		return f
	}
	if p.Spec.Size != nil {
		master, slave, err := openPTY(*p.Spec.Size, p.Spec.User)
		if err != nil {
			return nil, nil, err
		}
		p.master, p.input = keep(master), master
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = slave, slave, slave
		return map[Stream]*os.File{Terminal: master}, []*os.File{keep(slave)}, nil
	}
	pipe := func() (r, w *os.File, err error) {
		if r, w, err = os.Pipe(); err != nil {
			return nil, nil, fmt.Errorf("make a pipe: %w", err)
		}
		return keep(r), keep(w), nil
	}
	outR, outW, err := pipe()
	if err != nil {
		return nil, nil, err
	}
	errR, errW, err := pipe()
	if err != nil {
		return nil, nil, err
	}
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	theirs = []*os.File{outW, errW}
	if !p.Spec.NoInput {
		inR, inW, err := pipe()
		if err != nil {
			return nil, nil, err
		}
		p.cmd.Stdin, p.input = inR, inW
		theirs = append(theirs, inR)
	}
	return map[Stream]*os.File{Stdout: outR, Stderr: errR}, theirs, nil
}

func (r *Registry) add(p *Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[uint32]*Process{}
	}
	r.all[p.PID] = p
	go func() {
		<-p.Done()
		time.AfterFunc(remembered, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.all[p.PID] == p { // the number may be another's
				delete(r.all, p.PID)
			}
		})
	}()
}

// List returns those that run, by number.
func (r *Registry) List() []*Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	var running []*Process
	for _, p := range r.all {
		if !p.ended() {
			running = append(running, p)
		}
	}
	slices.SortFunc(running, func(a, b *Process) int { return int(int64(a.PID) - int64(b.PID)) })
	return running
}

func (p *Process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Get finds a process that runs, or that ended a short while ago. The error is errdefs.ErrNotFound.
func (r *Registry) Get(pid uint32) (*Process, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p, ok := r.all[pid]; ok {
		return p, nil
	}
	return nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("there is no process %d that was started here", pid))
}

// Tagged finds a process by its tag: of several one that runs.
func (r *Registry) Tagged(tag string) (*Process, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found *Process
	for _, p := range r.all {
		if p.Spec.Tag != nil && *p.Spec.Tag == tag && (found == nil || found.ended()) {
			found = p
		}
	}
	if found == nil {
		return nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("there is no process with the tag %q", tag))
	}
	return found, nil
}
