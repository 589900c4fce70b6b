package conformance

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var stressRows = []row{
	{name: "CreateDelete", test: createDelete, long: true},
	{name: "ExecChurn", test: execChurn, shared: true},
}

// createDelete: many containers, some at a time, each with all checks of an orderly end.
func createDelete(b *box) {
	workers, each := 4, 50
	if !b.d.fake() {
		workers, each = 2, 10
	}
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			for i := range each {
				b.Run(fmt.Sprintf("%d.%d", worker, i), func(t *testing.T) {
					c := b.d.box(t)
					p := c.run(lines(3, 5))
					p.ends(5, "line 1\nline 2\nline 3\n")
					c.must(p.delete())
					c.shutdown()
					c.exactly("create", "start", "exit init 5", "delete 5")
				})
			}
		})
	}
	wg.Wait()
}

// execChurn: a shim has as many descriptors, and children, after many execs as before.
func execChurn(b *box) {
	rounds := 60
	if !b.d.fake() {
		rounds = 12
	}
	round := func(i int) {
		p := b.exec([]command{cat, exit(3), missing, sleep}[i%4])
		err := p.start()
		switch {
		case i%4 == 2:
			b.notFound(err)
		default:
			b.must(err)
			b.must(p.closeIO())
			if i%4 == 3 {
				b.must(p.kill(unix.SIGKILL))
			}
			p.wait()
		}
		b.must(p.delete())
		p.close()
	}
	for i := range 4 {
		round(i)
	}
	before := b.holdings()
	for i := range rounds {
		round(i)
	}
	// Copiers that have just come to their end may not have closed theirs.
	for end := time.Now().Add(b.d.cfg.Timeout(limit)); b.holdings() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("descriptors and children were %d and are %d", before, b.holdings())
		}
	}
}

// holdings counts the shim's descriptors and children.
func (b *box) holdings() int {
	b.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.shim))
	b.must(err)
	n := len(fds)
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", b.shim))
	b.must(err)
	for _, t := range threads {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", b.shim, t.Name()))
		if err == nil { // the thread may have ended
			n += len(strings.Fields(string(children)))
		}
	}
	return n
}
