package conformance

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

var runRows = []row{
	{name: "Lifecycle", test: lifecycle},
	{name: "InitExitCodes", test: initExitCodes, long: true},
	{name: "OutputThenExit", test: outputThenExit},
	{name: "Events", test: eventOrder},
	{name: "FastExitInit", test: fastExitInit},
	{name: "CommandNotFound", test: initNotFound},
	{name: "KillCreated", test: killCreated},
	{name: "DeleteCreated", test: deleteCreated},
}

func lifecycle(b *box) {
	p := b.create(sleep)
	if s := p.is(task.Status_CREATED); s.Bundle != b.bundle || s.Stdin != p.stdin || s.Stdout != p.stdout || s.Stderr != p.stderr || s.Terminal {
		b.Errorf("state %v", s)
	}
	b.must(p.start())
	p.is(task.Status_RUNNING)
	b.must(p.kill(unix.SIGKILL))
	p.ends(137, "")
	if s := p.is(task.Status_STOPPED); s.ExitStatus != 137 || s.ExitedAt == nil {
		b.Errorf("state %v", s)
	}
	r, err := b.client.Delete(b.d.context(b.T), &taskapi.DeleteRequest{ID: b.id})
	b.must(err)
	if r.ExitStatus != 137 || int(r.Pid) != b.machine || r.ExitedAt == nil {
		b.Errorf("delete answers %v", r)
	}
	b.refused("state", second(p.state()), codes.NotFound)
	b.shutdown()
	if r := b.clean(); r.ExitStatus != 137 || int(r.Pid) != b.machine {
		b.Errorf("shim delete answers %v", r)
	}
	b.exactly("create", "start", "exit init 137", "delete 137")
}

func initExitCodes(b *box) {
	for i, code := range []int{0, 1, 2, 42, 127, 255} {
		b.Run(fmt.Sprint(code), func(t *testing.T) {
			c := b.d.box(t)
			p := c.run(exit(code))
			p.ends(uint32(code), "")
			if i == 0 { // what was there first, too, is told by shim delete
				c.must(p.delete())
			}
			c.shutdown()
		})
	}
}

func outputThenExit(b *box) {
	var want strings.Builder
	for i := range 50 {
		fmt.Fprintf(&want, "line %d\n", i+1)
	}
	b.run(lines(50, 7)).ends(7, want.String())
}

func eventOrder(b *box) {
	b.run(sleep)
	b.exec(exit(3)).started().ends(3, "")
	e := b.exec(sleep).started()
	b.exec(sleep) // never started
	b.must(b.init.kill(unix.SIGKILL))
	e.ends(137, "")
	b.init.ends(137, "")
	b.must(b.init.delete())
	b.exactly("create", "start", "exec-added e1", "exec-started e1", "exit e1 3", "exec-added e2", "exec-started e2", "exec-added e3",
		"exit e2 137", "exit init 137", "delete 137")
}

// fastExitInit: what a container has written is delivered, although containerd asks the shim to end.
func fastExitInit(b *box) {
	p := b.run(read(dataMiB << 20))
	b.shutdown()
	b.sameData(p.output(), dataMiB<<20)
	if got := p.wait(); got != 0 {
		b.Errorf("status %d", got)
	}
	b.must(p.delete())
}

// sameData compares with the first n bytes of the data.
func (b *box) sameData(got []byte, n int64) {
	b.Helper()
	want, err := io.ReadAll(data(n))
	b.must(err)
	if !bytes.Equal(got, want) {
		same := 0
		for same < min(len(got), len(want)) && got[same] == want[same] {
			same++
		}
		b.Errorf("got %d bytes of %d, of which %d are right", len(got), n, same)
	}
}

// initNotFound: Create or Start says so, and nothing has run.
func initNotFound(b *box) {
	r := b.request(missing)
	resp, err := b.client.Create(b.d.within(b.T, bootLimit), r)
	b.init.opened()
	if err != nil {
		b.notFound(err)
		if got := b.events(); len(got) > 0 {
			b.Errorf("events %q", got)
		}
		return
	}
	b.born(resp)
	b.notFound(b.init.start())
	b.init.output()
	b.must(b.init.delete())
	b.exactly("create", "delete 127")
}

// notFound checks the error for a command that isn't there.
func (b *box) notFound(err error) {
	b.Helper()
	if err == nil || !strings.Contains(err.Error(), "nonsense") || !strings.Contains(err.Error(), "not found in $PATH") || strings.Contains(err.Error(), "\n") {
		b.Fatalf("error %v", err)
	}
}

func killCreated(b *box) {
	p := b.create(sleep)
	b.must(p.kill(unix.SIGKILL))
	p.ends(137, "")
	b.must(p.delete())
	b.exactly("create", "exit init 137", "delete 137")
}

// deleteCreated: what never ran has no output to wait for.
func deleteCreated(b *box) {
	p := b.create(sleep)
	began := time.Now()
	b.must(p.delete())
	if took := time.Since(began); b.d.fake() && took > b.d.cfg.Timeout(time.Second) {
		b.Errorf("it took %s", took)
	}
	b.await("delete")
	b.refused("state", second(p.state()), codes.NotFound)
}
