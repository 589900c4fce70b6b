// Command bench measures what a user waits for and what a machine costs. It prints Markdown with the conditions; absolute
// times mean little on another host, ratios more. Its parts, of which an argument names one:
//
//	network    without machines, in network namespaces of its own: the datapath beside plain forwarding, a place in the
//	           network, another policy
//	ingress    without machines: the proxy beside the same server asked directly
//	list       without machines: E2B's API lists many sandboxes
//	machines   on a stack of its own: `ctr run` beside runc on the same containerd in the same run, exec, cold boot, memory
//	           per idle machine, clones of disks
//	snapshots  on a stack of its own: saves by what was written, restores, clones, rollback, pause and resume, what idle
//	           clones take, large guests; beside what the reference says of itself
//	e2b        on a stack of its own: creates by E2B's API, many at once; commands and files by the proxy and directly
//	pool       on stacks of their own: creates with and without the warm pool in turns, and in a row
//	burst      on a stack of its own: 50 creates at once, without and with as many machines in the warm pool
//	templates  on a stack of its own: a template's build by phase, with and without what was done before
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

func main() {
	n := flag.Int("n", 20, "how often each thing is measured")
	idle := flag.Int("idle", 5, "how many idle machines are measured")
	clones := flag.Int("clones", 50, "how many idle clones are measured")
	flag.Parse()
	if err := run(flag.Arg(0), *n, *idle, *clones); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// parts are what an argument can name, in the order in which all are run.
func parts(root string, n, idle, clones int) []part {
	return []part{
		{"network", untilInterrupted(func(ctx context.Context) error { return networks(ctx, root, n) })},
		{"ingress", untilInterrupted(func(ctx context.Context) error { return ingresses(ctx, root, n) })},
		{"list", untilInterrupted(func(ctx context.Context) error { return lists(ctx, n) })},
		{"machines", func() error { return machines(root, n, idle) }},
		{"snapshots", func() error { return snapshots(root, n, clones) }},
		{"e2b", untilInterrupted(func(ctx context.Context) error { return sandboxes(ctx, root, n) })},
		{"pool", untilInterrupted(func(ctx context.Context) error { return pools(ctx, root, n) })},
		{"burst", untilInterrupted(func(ctx context.Context) error { return bursts(ctx, root) })},
		{"templates", untilInterrupted(func(ctx context.Context) error { return templates(ctx, root, n) })},
	}
}

type part struct {
	name    string
	measure func() error
}

// untilInterrupted has what is measured end in order when the user interrupts it.
func untilInterrupted(measure func(context.Context) error) func() error {
	return func() error {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
		defer stop()
		return measure(ctx)
	}
}

func run(name string, n, idle, clones int) error {
	root, err := stack.Repository()
	if err != nil {
		return err
	}
	all := parts(root, n, idle, clones)
	if name != "" {
		i := slices.IndexFunc(all, func(p part) bool { return p.name == name })
		if i < 0 {
			return fmt.Errorf("there is no part %q: the package's comment has all of them", name)
		}
		all = all[i : i+1]
	}
	conditions(n)
	for _, p := range all {
		if err := p.measure(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

func machines(root string, n, idle int) (err error) {
	started := time.Now()
	s, err := stack.Start(root)
	if s != nil { // with an error, too
		defer func() {
			if e := s.Stop(); err == nil {
				err = e
			}
		}()
	}
	if err != nil {
		return err
	}
	up := time.Since(started)
	if err := s.ImportDemo(); err != nil {
		return err
	}
	b := &bench{Stack: s, n: n}
	b.conditions()
	fmt.Printf("\n`cube up` from nothing (store made, accelerator probed, base snapshot booted and saved): %.1f s\n", up.Seconds())
	for _, step := range []func() error{b.runs, b.added, b.boots, b.execs, b.disks, func() error { return b.memory(idle) }} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

type bench struct {
	*stack.Stack
	n int
}

// conditions prints what all figures depend on.
func conditions(n int) {
	var u unix.Utsname
	_ = unix.Uname(&u)
	load, _ := os.ReadFile("/proc/loadavg")
	model := ""
	cpuinfo, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(cpuinfo)) {
		if _, v, ok := strings.Cut(line, "model name\t: "); ok {
			model = strings.TrimSpace(v)
			break
		}
	}
	fmt.Printf("Host: %d CPUs (%s), Linux %s, load at the start %s; n = %d.\n",
		strings.Count(string(cpuinfo), "processor\t:"), model, unix.ByteSliceToString(u.Release[:]), strings.Fields(string(load))[0], n)
}

// conditions prints what machines' figures depend on besides.
func (b *bench) conditions() {
	doctor := b.Cube("doctor")
	for line := range strings.Lines(doctor.Stdout) {
		for _, word := range []string{"accelerator", "qemu", "QEMU", "guest kernel", "reflink", "containerd"} {
			if strings.Contains(line, word) {
				fmt.Printf("    %s\n", strings.TrimSpace(line))
				break
			}
		}
	}
}

// sample is a set of durations of one thing.
type sample []time.Duration

func (s sample) quantile(q float64) time.Duration { return quantile(s, q) }

func quantile[T cmp.Ordered](of []T, q float64) T {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func (s sample) row(name string) string {
	return fmt.Sprintf("| %s | %.0f | %.0f |", name, ms(s.quantile(0.5)), ms(s.quantile(0.95)))
}

// fineRow is row for what takes less than a few milliseconds.
func (s sample) fineRow(name string) string {
	return fmt.Sprintf("| %s | %.2f | %.2f |", name, ms(s.quantile(0.5)), ms(s.quantile(0.95)))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// timed runs a command and says how long it took.
func (b *bench) timed(args ...string) (time.Duration, error) {
	started := time.Now()
	r := b.Ctr(args...)
	return time.Since(started), r.Err
}

// runs measures `ctr run` of true, a machine and runc in turn.
func (b *bench) runs() error {
	log := filepath.Join(b.Config.LogDir(), "containerd.log")
	if _, err := b.timed(runArgs("io.cube.v2", b.id("warm", 0), []string{"true"})...); err != nil {
		return err
	}
	st, err := os.Stat(log)
	if err != nil {
		return err
	}
	var cube, runc sample
	for i := range b.n {
		d, err := b.timed(runArgs("io.cube.v2", b.id("run", i), []string{"true"})...)
		if err != nil {
			return err
		}
		cube = append(cube, d)
		if d, err = b.timed(runArgs("io.containerd.runc.v2", b.id("runc", i), []string{"true"})...); err != nil {
			return err
		}
		runc = append(runc, d)
	}
	fmt.Printf("\n### `ctr run --rm` of `true`\n\n| | p50 ms | p95 ms |\n| --- | --- | --- |\n%s\n%s\n\nRatio of the medians: %.1f.\n",
		cube.row("io.cube.v2, restored from a base snapshot"), runc.row("io.containerd.runc.v2"),
		ms(cube.quantile(0.5))/ms(runc.quantile(0.5)))
	return b.stages(log, st.Size())
}

// runArgs are those of `ctr run`, with annotations.
func runArgs(runtime, id string, command []string, annotations ...string) []string {
	args := []string{"run", "--rm", "--runtime", runtime, "--snapshotter", "cube"}
	for _, a := range annotations {
		args = append(args, "--annotation", a)
	}
	return append(append(args, stack.Image, id), command...)
}

func (b *bench) id(what string, i int) string { return fmt.Sprintf("%s-%s-%d", b.Name(), what, i) }

// execs measures `ctr task exec` of true in running containers of both runtimes.
func (b *bench) execs() error {
	samples := map[string]sample{}
	runtimes := []string{"io.cube.v2", "io.containerd.runc.v2"}
	for i, runtime := range runtimes {
		id := b.id("exec", i)
		if r := b.Ctr("run", "-d", "--runtime", runtime, "--snapshotter", "cube", stack.Image, id, "sleep", "10000"); r.Err != nil {
			return r.Err
		}
		for k := range b.n {
			d, err := b.timed("task", "exec", "--exec-id", fmt.Sprint("e", k), id, "true")
			if err != nil {
				return err
			}
			samples[runtime] = append(samples[runtime], d)
		}
		b.remove(id)
	}
	fmt.Printf("\n### `ctr task exec` of `true`\n\n| | p50 ms | p95 ms |\n| --- | --- | --- |\n")
	for _, runtime := range runtimes {
		fmt.Println(samples[runtime].row(runtime))
	}
	return nil
}

func (b *bench) remove(id string) {
	b.Ctr("task", "rm", "-f", id)
	b.Ctr("container", "rm", id)
}

// disks measures preparing a container's root from the image, beside overlayfs.
func (b *bench) disks() error {
	key := ""
	r := b.Ctr("snapshots", "--snapshotter", "cube", "ls")
	for line := range strings.Lines(r.Stdout) {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == "Committed" {
			key = f[0]
		}
	}
	if key == "" {
		return fmt.Errorf("no committed snapshot: %s", r.Stdout)
	}
	var prepare, remove sample
	for i := range b.n {
		name := b.id("disk", i)
		d, err := b.timed("snapshots", "--snapshotter", "cube", "prepare", name, key)
		if err != nil {
			return err
		}
		prepare = append(prepare, d)
		if d, err = b.timed("snapshots", "--snapshotter", "cube", "rm", name); err != nil {
			return err
		}
		remove = append(remove, d)
	}
	fmt.Printf("\n### Disk clone, as `ctr snapshots`\n\n| | p50 ms | p95 ms |\n| --- | --- | --- |\n%s\n%s\n", prepare.row("prepare"), remove.row("rm"))
	return nil
}
