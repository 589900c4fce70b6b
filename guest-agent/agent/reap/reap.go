// Package reap collects the exits of all processes that PID 1 is left with: those that it started and those whose
// parents died. Whoever wants a process's status gets it here; nobody else may wait for children.
package reap

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Exit is how a process ended.
type Exit struct {
	// Status is 0–255, or 128 + the number of the signal.
	Status uint32
	Time   time.Time
}

// Reaper hands out exits. There may be one in a process.
type Reaper struct {
	mu        sync.Mutex
	claimed   map[int]chan Exit
	expecting int          // Expectations that are not done
	early     map[int]Exit // exits that nobody had claimed, while expecting > 0
}

// New makes a reaper and starts it. It runs until the process ends.
func New() *Reaper {
	r := &Reaper{claimed: map[int]chan Exit{}, early: map[int]Exit{}}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGCHLD)
	go func() {
		for range signals {
			r.collect()
		}
	}()
	return r
}

// collect reaps what has ended. One signal may stand for many exits.
func (r *Reaper) collect() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil || pid <= 0: // no child, or none that has ended
			return
		}
		r.deliver(pid, Exit{Status: exitStatus(status), Time: time.Now()})
	}
}

func exitStatus(s unix.WaitStatus) uint32 {
	if s.Signaled() {
		return 128 + uint32(s.Signal())
	}
	return uint32(s.ExitStatus())
}

func (r *Reaper) deliver(pid int, e Exit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.claimed[pid]; ok {
		delete(r.claimed, pid)
		c <- e
	} else if r.expecting > 0 {
		r.early[pid] = e
	}
}

// Expectation covers the time in which a process may come into being and end before its pid is known.
type Expectation struct {
	r    *Reaper
	once sync.Once
}

// Expect begins such a time. Done must be called.
func (r *Reaper) Expect() *Expectation {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expecting++
	return &Expectation{r: r}
}

// Claim says that the caller wants the exit of pid, which began to exist after Expect and is, or will be, a child of this
// process. The channel gets one value.
func (e *Expectation) Claim(pid int) <-chan Exit {
	e.r.mu.Lock()
	defer e.r.mu.Unlock()
	c := make(chan Exit, 1)
	if exit, ok := e.r.early[pid]; ok {
		delete(e.r.early, pid)
		c <- exit
	} else {
		e.r.claimed[pid] = c
	}
	return c
}

// Done ends the time. Idempotent.
func (e *Expectation) Done() {
	e.once.Do(func() {
		e.r.mu.Lock()
		defer e.r.mu.Unlock()
		if e.r.expecting--; e.r.expecting == 0 {
			clear(e.r.early)
		}
	})
}

// Command is a program to run.
type Command struct {
	Path  string
	Args  []string // without the program's name
	Env   []string
	Dir   string
	Files [3]*os.File // nil: /dev/null
	// Personality is the program's execution domain (personality(2)).
	Personality uint
}

// Start starts a program. The channel gets one value.
func (r *Reaper) Start(c Command) (pid int, exit <-chan Exit, err error) {
	var files [3]uintptr
	for i, f := range c.Files {
		if f == nil {
			if f, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
				return 0, nil, err
			}
			defer f.Close()
		}
		files[i] = f.Fd()
	}
	if c.Personality != 0 {
		// It is the thread's, and inherited.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		before, err := personality(c.Personality)
		if err != nil {
			return 0, nil, err
		}
		defer func() { _, _ = personality(before) }()
	}
	e := r.Expect()
	defer e.Done()
	pid, err = syscall.ForkExec(c.Path, append([]string{c.Path}, c.Args...), &syscall.ProcAttr{
		Dir: c.Dir, Env: c.Env, Files: files[:], Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, nil, &os.PathError{Op: "start", Path: c.Path, Err: err}
	}
	return pid, e.Claim(pid), nil
}

// personality sets the thread's execution domain and returns the one before.
func personality(p uint) (before uint, err error) {
	old, _, errno := unix.Syscall(unix.SYS_PERSONALITY, uintptr(p), 0, 0)
	if errno != 0 {
		return 0, os.NewSyscallError("personality", errno)
	}
	return uint(old), nil
}

// Run runs a program to its end. When ctx ends first, the program is killed, and the error is ctx's.
func (r *Reaper) Run(ctx context.Context, c Command) (Exit, error) {
	pid, exit, err := r.Start(c)
	if err != nil {
		return Exit{}, err
	}
	select {
	case e := <-exit:
		return e, nil
	case <-ctx.Done():
		// It may have just been reaped; its pid isn't taken again that soon (boot sets the largest pid_max).
		_ = unix.Kill(pid, unix.SIGKILL)
		<-exit
		return Exit{}, context.Cause(ctx)
	}
}
