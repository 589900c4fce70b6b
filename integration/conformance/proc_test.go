package conformance

import (
	"errors"
	"fmt"
	"strconv"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
)

// command is one program as each side knows it.
type command struct{ fake, guest []string }

func (c command) args(d *daemon) []string {
	if d.fake() {
		return c.fake
	}
	return c.guest
}

// both is a program with arguments for the fake, and a shell script that does the same in a real guest.
func both(script string, fake ...string) command {
	return command{fake: fake, guest: []string{"sh", "-c", script}}
}

// The programs. Of signals, only SIGKILL ends one that is the first process of its namespace.
var (
	sleep   = both("exec sleep 100000", "sleep")
	cat     = both("exec cat", "cat")
	hog     = both("x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done", "hog")
	clock   = both("date +%s", "clock")
	memory  = both("cat /sys/fs/cgroup/memory.max", "memory")
	missing = command{fake: []string{"nonsense"}, guest: []string{"nonsense"}}
	leave   = both("echo left behind; sleep 1000 & exit 0", "leave", "left behind\n")
	ttySize = both("stty size", "size")
)

func exit(code int) command { return both(fmt.Sprint("exit ", code), "exit", strconv.Itoa(code)) }

// lines writes n lines and ends with a status.
func lines(n, code int) command {
	return both(fmt.Sprintf("i=1; while [ $i -le %d ]; do echo line $i; i=$((i+1)); done; exit %d", n, code),
		"lines", strconv.Itoa(n), strconv.Itoa(code))
}

// read writes the first n bytes of the data, a multiple of 64 KiB.
func read(n int) command {
	return both(fmt.Sprintf("exec dd if=/data bs=64k count=%d 2>/dev/null", n>>16), "data", strconv.Itoa(n))
}

func namespaceOf(kind string) command {
	return both("readlink /proc/self/ns/"+kind, "namespace", kind)
}

// proc is a container's init or an exec.
type proc struct {
	b      *box
	execID string // "" for init
	*streams
}

func (p *proc) name() string {
	if p.execID == "" {
		return "init"
	}
	return p.execID
}

func (b *box) streams(terminal bool) *streams {
	b.Helper()
	return newStreams(b.T, b.bundle, terminal, b.d.cfg.Timeout(limit))
}

// exec adds a process, which start starts.
func (b *box) exec(c command) *proc { return b.execWith(c, false) }

func (b *box) execWith(c command, terminal bool) *proc {
	b.Helper()
	*b.execs++
	p := &proc{b: b, execID: "e" + strconv.Itoa(*b.execs), streams: b.streams(terminal)}
	b.must(b.add(p.execID, c.args(b.d), p.streams, terminal))
	return p
}

// add calls Exec. Without streams the process has none.
func (b *box) add(execID string, args []string, s *streams, terminal bool) error {
	b.Helper()
	r := &taskapi.ExecProcessRequest{ID: b.id, ExecID: execID, Terminal: terminal, Spec: processOf(args)}
	if s != nil {
		r.Stdin, r.Stdout, r.Stderr = s.stdin, s.stdout, s.stderr
	}
	return second(b.client.Exec(b.d.context(b.T), r))
}

func (p *proc) start() error {
	p.b.Helper()
	r, err := p.b.client.Start(p.b.d.context(p.b.T), &taskapi.StartRequest{ID: p.b.id, ExecID: p.execID})
	if p.streams != nil {
		p.opened()
	}
	if err == nil && r.Pid == 0 {
		return errors.New("started with pid 0")
	}
	return err
}

// started starts it, which must work.
func (p *proc) started() *proc {
	p.b.Helper()
	if err := p.start(); err != nil {
		p.b.Fatalf("start %s: %v", p.name(), err)
	}
	return p
}

func (p *proc) wait() uint32 {
	p.b.Helper()
	r, err := p.b.client.Wait(p.b.d.context(p.b.T), &taskapi.WaitRequest{ID: p.b.id, ExecID: p.execID})
	if err != nil {
		p.b.Fatalf("wait for %s: %v", p.name(), err)
	}
	if r.ExitedAt == nil {
		p.b.Errorf("%s ended at no time", p.name())
	}
	return r.ExitStatus
}

// output is all that it writes to its standard output.
func (p *proc) output() []byte {
	p.b.Helper()
	b, err := p.out.all(p.b.d.cfg.Timeout(limit))
	if err != nil {
		p.b.Fatalf("output of %s after %d bytes: %v", p.name(), len(b), err)
	}
	return b
}

// ends checks that it ends with that status and output, and deletes an exec.
func (p *proc) ends(status uint32, output string) {
	p.b.Helper()
	if got := p.wait(); got != status {
		p.b.Errorf("%s ended with status %d, want %d", p.name(), got, status)
	}
	if got := string(p.output()); got != output {
		p.b.Errorf("%s wrote %q, want %q", p.name(), got, output)
	}
	if p.execID != "" {
		p.b.must(p.delete())
	}
}

func (p *proc) kill(s unix.Signal) error {
	p.b.Helper()
	_, err := p.b.client.Kill(p.b.d.context(p.b.T), &taskapi.KillRequest{ID: p.b.id, ExecID: p.execID, Signal: uint32(s)})
	return err
}

func (p *proc) closeIO() error {
	p.b.Helper()
	_, err := p.b.client.CloseIO(p.b.d.context(p.b.T), &taskapi.CloseIORequest{ID: p.b.id, ExecID: p.execID, Stdin: true})
	return err
}

func (p *proc) resize(cols, rows uint32) error {
	p.b.Helper()
	_, err := p.b.client.ResizePty(p.b.d.context(p.b.T), &taskapi.ResizePtyRequest{ID: p.b.id, ExecID: p.execID, Width: cols, Height: rows})
	return err
}

func (p *proc) delete() error {
	p.b.Helper()
	_, err := p.b.client.Delete(p.b.d.context(p.b.T), &taskapi.DeleteRequest{ID: p.b.id, ExecID: p.execID})
	return err
}

func (p *proc) state() (*taskapi.StateResponse, error) {
	p.b.Helper()
	return p.b.client.State(p.b.d.context(p.b.T), &taskapi.StateRequest{ID: p.b.id, ExecID: p.execID})
}

// is checks its state.
func (p *proc) is(want task.Status) *taskapi.StateResponse {
	p.b.Helper()
	s, err := p.state()
	if err != nil {
		p.b.Fatalf("state of %s: %v", p.name(), err)
	}
	if s.Status != want || s.Pid == 0 {
		p.b.Errorf("%s is %v with pid %d, want %v", p.name(), s.Status, s.Pid, want)
	}
	return s
}
