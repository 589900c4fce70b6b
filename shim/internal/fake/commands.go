package fake

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// programs are what a process can be told to run, by its first argument. They return its status, and whether it ends
// with them. Any other is not found.
var programs = map[string]func(p *process) (status uint32, ends bool){
	// exit N ends with status N.
	"exit": func(p *process) (uint32, bool) { return p.number(1), true },
	// echo TEXT N writes the text and ends with status N.
	"echo": func(p *process) (uint32, bool) {
		p.write(strings.NewReader(p.args[1]))
		return p.number(2), true
	},
	// lines N S writes N lines and ends with status S.
	"lines": func(p *process) (uint32, bool) {
		for i := range p.number(1) {
			p.say("line", i+1)
		}
		return p.number(2), true
	},
	// spew N writes N bytes and ends.
	"spew": func(p *process) (uint32, bool) {
		p.write(io.LimitReader(zeros{}, int64(p.number(1))))
		return 0, true
	},
	// data N writes the first N bytes of what a zero seed makes of ChaCha8, so that a reader can tell them.
	"data": func(p *process) (uint32, bool) {
		p.write(io.LimitReader(rand.NewChaCha8([32]byte{}), int64(p.number(1))))
		return 0, true
	},
	// cat copies its input to its output until the input ends.
	"cat": func(p *process) (uint32, bool) {
		if p.stdin != nil {
			p.write(p.stdin)
		}
		return 0, true
	},
	// tally counts the lines that it reads, and says at which one it is. It goes on counting where it was saved.
	"tally": func(p *process) (uint32, bool) {
		for lines := bufio.NewScanner(p.stdin); lines.Scan(); {
			p.say(p.count.Add(1))
		}
		<-p.signal
		return 0, true
	},
	// sleep waits for a signal.
	"sleep": func(p *process) (uint32, bool) {
		<-p.signal
		return 0, true
	},
	// leave ends at once, but something else keeps its output open. leave TEXT writes the text before.
	"leave": func(p *process) (uint32, bool) {
		p.write(strings.NewReader(strings.Join(p.args[1:], " ")))
		p.tell(0)
		return 0, false
	},
	// hog takes memory until the kernel ends it.
	"hog": func(p *process) (uint32, bool) {
		p.agent.Emit(&api.Event{Event: &api.Event_Oom{Oom: &api.OOM{Id: p.container}}})
		return 137, true
	},
	// clock writes the time, in seconds.
	"clock": func(p *process) (uint32, bool) {
		p.say(time.Now().Unix())
		return 0, true
	},
	// memory writes the container's memory limit.
	"memory": func(p *process) (uint32, bool) {
		p.say(p.agent.memory(p.container))
		return 0, true
	},
	// namespace TYPE writes the id of the container whose namespace it is in.
	"namespace": func(p *process) (uint32, bool) {
		p.say(p.agent.namespace(p.container, p.args[1]))
		return 0, true
	},
	// size writes the rows and columns of its terminal.
	"size": func(p *process) (uint32, bool) {
		var columns, rows int
		fmt.Sscanf(p.agent.Size(p.container, p.execID), "%dx%d", &columns, &rows)
		p.say(rows, columns)
		return 0, true
	},
}

func (p *process) number(i int) uint32 {
	n, _ := strconv.Atoi(p.args[i])
	return uint32(n)
}

// write writes what it reads, with rests while the container is paused.
func (p *process) write(r io.Reader) {
	if p.stdout != nil {
		io.Copy(unpausedWriter{p}, r) // the reader may go
	}
}

// say writes a line.
func (p *process) say(words ...any) { p.write(strings.NewReader(fmt.Sprintln(words...))) }

type unpausedWriter struct{ p *process }

func (w unpausedWriter) Write(b []byte) (int, error) {
	w.p.awaitResume()
	return w.p.stdout.Write(b)
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return copy(b, bytes.Repeat([]byte{0}, len(b))), nil }

// awaitResume waits until the container isn't paused, or the process has been told to end.
func (p *process) awaitResume() {
	a := p.agent
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := a.containers[p.container]; c != nil && c.paused && !p.signalled(); {
		a.changed.Wait()
	}
}

func (p *process) signalled() bool {
	select {
	case <-p.signal:
		return true
	default:
		return false
	}
}

// memory is a container's memory limit.
func (a *Agent) memory(id string) int64 {
	return look(a, id, func(c *container) (limit int64) {
		if r := c.spec.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil {
			limit = *r.Memory.Limit
		}
		for _, u := range c.updates {
			if u.Memory != nil && u.Memory.Limit != nil {
				limit = *u.Memory.Limit
			}
		}
		return limit
	})
}

// namespace is the id of the container whose namespace of that type a container is in.
func (a *Agent) namespace(id, kind string) string {
	return look(a, id, func(c *container) string {
		for _, ns := range c.request.Namespaces {
			if ns.Type == kind {
				return ns.Container
			}
		}
		return id
	})
}
