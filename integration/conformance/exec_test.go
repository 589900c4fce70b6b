package conformance

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
)

var execRows = []row{
	{name: "StdioRoundTrip", test: stdioRoundTrip, shared: true},
	{name: "RoundTrip20MiB", test: bulkRoundTrip, shared: true},
	{name: "StdinDetachReattach", test: detachReattach, shared: true},
	{name: "ExitCodes", test: execExitCodes, shared: true},
	{name: "Signal", test: execSignal, shared: true},
	{name: "FastExitOutput", test: fastExitOutput, shared: true},
	{name: "FileRead64MiB", test: largeFile, shared: true, long: true},
	{name: "OutputDrainAfterExit", test: drainAfterExit, shared: true},
	{name: "DiscardIO", test: discardIO, shared: true},
	{name: "CommandNotFound", test: execNotFound, shared: true},
	{name: "Clock", test: guestClock, shared: true},
	{name: "Terminal", test: terminal, shared: true},
	{name: "Concurrent", test: concurrentExecs, shared: true},
}

func stdioRoundTrip(b *box) {
	p := b.exec(cat).started()
	_, err := p.in.WriteString("hello\n")
	b.must(err)
	b.must(p.out.until("hello\n", b.d.cfg.Timeout(limit)))
	b.must(p.closeIO())
	p.ends(0, "hello\n")
}

func bulkRoundTrip(b *box) {
	const n = 20 << 20
	p := b.exec(cat).started()
	_, err := io.Copy(p.in, data(n)) // the sink reads meanwhile
	b.must(err)
	b.must(p.closeIO())
	b.sameData(p.output(), n)
	if got := p.wait(); got != 0 {
		b.Errorf("status %d", got)
	}
	b.must(p.delete())
}

// detachReattach: a client that goes doesn't end the process's input; CloseIO does.
func detachReattach(b *box) {
	p := b.exec(cat).started()
	for i := range 3 {
		text := fmt.Sprintf("client %d\n", i)
		_, err := p.in.WriteString(text)
		b.must(err)
		b.must(p.out.until(text, b.d.cfg.Timeout(limit)))
		p.is(task.Status_RUNNING)
		p.detach()
		p.reattach(b.T)
	}
	b.must(p.closeIO())
	p.ends(0, "client 0\nclient 1\nclient 2\n")
}

func execExitCodes(b *box) {
	for _, code := range []int{0, 1, 2, 42, 127, 255} {
		b.exec(exit(code)).started().ends(uint32(code), "")
	}
}

func execSignal(b *box) {
	p := b.exec(sleep).started()
	b.must(p.kill(unix.SIGTERM))
	p.ends(143, "")
}

func fastExitOutput(b *box) {
	for range 5 {
		p := b.exec(read(256 << 10)).started()
		b.sameData(p.output(), 256<<10)
		if got := p.wait(); got != 0 {
			b.Errorf("status %d", got)
		}
		b.must(p.delete())
	}
}

func largeFile(b *box) {
	began := time.Now()
	p := b.exec(read(sharedMiB << 20)).started()
	b.sameData(p.output(), sharedMiB<<20)
	b.Logf("%d MiB in %s", sharedMiB, time.Since(began).Round(time.Millisecond))
	if got := p.wait(); got != 0 {
		b.Errorf("status %d", got)
	}
	b.must(p.delete())
}

// drainAfterExit: a process whose child keeps its output open ends all the same, and soon.
func drainAfterExit(b *box) {
	p := b.exec(leave).started()
	began := time.Now()
	p.ends(0, "left behind\n")
	if took := time.Since(began); took > b.d.cfg.Timeout(10*time.Second) {
		b.Errorf("the exit took %s; CRI gives it 10 s", took)
	}
}

// discardIO: without stdio, input is at its end and output goes nowhere.
func discardIO(b *box) {
	for id, c := range map[string]command{"discard-in": cat, "discard-out": read(1 << 20)} {
		b.must(b.add(id, c.args(b.d), nil, false))
		p := &proc{b: b, execID: id}
		p.started()
		if got := p.wait(); got != 0 {
			b.Errorf("%s ended with status %d", id, got)
		}
		b.must(p.delete())
	}
}

func execNotFound(b *box) {
	p := b.exec(missing)
	b.notFound(p.start())
	p.output()
	b.must(p.delete())
	for _, e := range b.events() {
		if e != "exec-added "+p.execID && strings.Contains(e+" ", " "+p.execID+" ") {
			b.Errorf("event %q of a process that never was", e)
		}
	}
}

func guestClock(b *box) {
	before := time.Now().Unix()
	p := b.exec(clock).started()
	text := strings.TrimSpace(string(p.output()))
	now, err := strconv.ParseInt(text, 10, 64)
	b.must(err)
	// A second for the truncation, another for a guest that is just being set.
	if now < before-2 || now > time.Now().Unix()+2 {
		b.Errorf("it is %d in the guest, and was %d here", now, before)
	}
	p.ends(0, text+"\n")
}

func terminal(b *box) {
	p := b.execWith(ttySize, true)
	b.must(p.resize(132, 43))
	p.started()
	if got := p.wait(); got != 0 {
		b.Errorf("status %d", got)
	}
	if got := strings.TrimSpace(string(p.output())); got != "43 132" {
		b.Errorf("rows and columns %q", got)
	}
	b.must(p.delete())
}

func concurrentExecs(b *box) {
	procs := make([]*proc, 8)
	for i := range procs {
		procs[i] = b.exec(lines(20, i))
	}
	errs := make([]error, len(procs))
	var wg sync.WaitGroup
	for i, p := range procs {
		wg.Go(func() { errs[i] = p.start() })
	}
	wg.Wait()
	want := b.exec(lines(20, 0)).started().output()
	for i, p := range procs {
		b.must(errs[i])
		if got := p.output(); !bytes.Equal(got, want) {
			b.Errorf("%s wrote %q", p.execID, got)
		}
		if got := p.wait(); got != uint32(i) {
			b.Errorf("%s ended with status %d, want %d", p.execID, got, i)
		}
		b.must(p.delete())
	}
}
