package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// snapshots measures machines that are saved, and made from what was saved, on a stack of its own: by the cube command, as a
// user waits for it, and by stages from the shims' logs.
func snapshots(root string, n, clones int) (err error) {
	s, err := stack.Start(root, "[vm]\nmax_memory = \"32GiB\"") // which the host needn't have
	if s != nil {                                               // with an error, too
		defer func() {
			if e := s.Stop(); err == nil {
				err = e
			}
		}()
	}
	if err != nil {
		return err
	}
	if err := s.ImportDemo(); err != nil {
		return err
	}
	b := &bench{Stack: s, n: n}
	b.conditions()
	for _, step := range []func() error{b.saves, b.lives, func() error { return b.density(clones) }, b.sizes, reference} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// small is what a container may use that gets a machine of 256 MiB: the guest's own part comes on top of it.
const small = "160MiB"

// must runs the cube command, times it, and returns what it prints.
func (b *bench) must(args ...string) (string, time.Duration, error) {
	began := time.Now()
	r := b.Cube(args...)
	took := time.Since(began)
	if r.Err != nil {
		return "", took, fmt.Errorf("cube %s: %w", strings.Join(args, " "), r.Err)
	}
	return strings.TrimSpace(r.Stdout), took, nil
}

// idle starts a container that sleeps.
func (b *bench) idle(id, memory string) error {
	_, _, err := b.must("run", "-d", "--name", id, "--memory", memory, stack.Image, "sleep", "1000000")
	return err
}

// discard removes containers.
func (b *bench) discard(ids ...string) error {
	_, _, err := b.must(append([]string{"rm", "-f"}, ids...)...)
	return err
}

// soil has a process in the container write to that many MiB of memory, and keep them.
func (b *bench) soil(id string, mib int) error {
	const hog = `mkfifo /done; perl -e 'push @x, q(x) x 1048576 for 1..$ARGV[0]; open F, q(>/done); print F qq(ok\n); close F; sleep 1000000' %d </dev/null >/dev/null 2>&1 & read ok </done`
	_, _, err := b.must("exec", id, "sh", "-c", fmt.Sprintf(hog, mib))
	return err
}

// saves measures saves of machines that have written a given part of their memory.
func (b *bench) saves() error {
	fmt.Printf("\n### A save of a running machine, by what it has written\n\n" +
		"| written by a process, MB | written in all, MB | guest stopped p50 ms | p95 ms | aim ms | complete and synced p50 ms | `cube snapshot create` p50 ms | p95 ms |\n" +
		"| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, c := range []struct {
		mib    int
		memory string
	}{{10, small}, {100, small}, {500, "900MiB"}} {
		id := b.id("dirty", c.mib)
		if err := b.idle(id, c.memory); err != nil {
			return err
		}
		if err := b.soil(id, c.mib); err != nil {
			return err
		}
		s, err := b.save(id, b.n)
		if err != nil {
			return err
		}
		written := quantile(s.written, 0.5)
		fmt.Printf("| %d | %.0f | %.1f | %.1f | %.0f | %.0f | %.0f | %.0f |\n", c.mib, written, ms(s.stopped.quantile(0.5)), ms(s.stopped.quantile(0.95)),
			15+written/2, ms(s.took.quantile(0.5)), ms(s.command.quantile(0.5)), ms(s.command.quantile(0.95)))
		if err := b.discard(id); err != nil {
			return err
		}
	}
	return nil
}

// saving is what is known of some saves.
type saving struct {
	stopped, took, command sample
	written                []float64 // MB
}

// save saves a container n times; each snapshot is deleted at once.
func (b *bench) save(id string, n int) (*saving, error) {
	j, err := b.journal()
	if err != nil {
		return nil, err
	}
	s := &saving{}
	for range n {
		name, took, err := b.must("snapshot", "create", id)
		if err != nil {
			return nil, err
		}
		s.command = append(s.command, took)
		if _, _, err := b.must("snapshot", "rm", name); err != nil {
			return nil, err
		}
	}
	made, err := j.entries("made a snapshot", n)
	if err != nil {
		return nil, err
	}
	if s.stopped, err = durations(made, "stopped"); err != nil {
		return nil, err
	}
	if s.took, err = durations(made, "took"); err != nil {
		return nil, err
	}
	for _, e := range made {
		bytes, err := strconv.ParseFloat(e["written"], 64)
		if err != nil {
			return nil, err
		}
		s.written = append(s.written, bytes/1e6)
	}
	return s, nil
}

// lives measures what users do with one small container, and the stages of a clone.
func (b *bench) lives() error {
	id := b.id("life", 0)
	if err := b.idle(id, small); err != nil {
		return err
	}
	j, err := b.journal()
	if err != nil {
		return err
	}
	rows := []struct {
		name string
		s    sample
	}{{name: "`cube clone`, which saves and makes one"}, {name: "`cube clone -n 10`"}, {name: "`cube rollback`"}, {name: "`cube pause`"}, {name: "`cube resume`"}}
	note := func(row int, args ...string) (out string, err error) {
		out, took, err := b.must(args...)
		rows[row].s = append(rows[row].s, took)
		return out, err
	}
	for range b.n {
		clone, err := note(0, "clone", id)
		if err != nil {
			return err
		}
		if err := b.discard(clone); err != nil {
			return err
		}
	}
	stages, err := cloneStages(j, b.n)
	if err != nil {
		return err
	}
	few := max(1, b.n/4)
	for range few {
		clones, err := note(1, "clone", "-n", "10", id)
		if err != nil {
			return err
		}
		if err := b.discard(strings.Fields(clones)...); err != nil {
			return err
		}
	}
	name, _, err := b.must("snapshot", "create", id)
	if err != nil {
		return err
	}
	for range b.n {
		if _, err := note(2, "rollback", id, name); err != nil {
			return err
		}
	}
	if _, _, err := b.must("snapshot", "rm", name); err != nil {
		return err
	}
	for range b.n {
		if _, err := note(3, "pause", id); err != nil {
			return err
		}
		if _, err := note(4, "resume", id); err != nil {
			return err
		}
	}
	fmt.Printf("\n### What a user waits for, with an idle container in a machine of 256 MiB\n\n| | n | p50 ms | p95 ms |\n| --- | --- | --- | --- |\n")
	for _, r := range rows {
		fmt.Printf("| %s | %d | %.0f | %.0f |\n", r.name, len(r.s), ms(r.s.quantile(0.5)), ms(r.s.quantile(0.95)))
	}
	fmt.Printf("\nStages of making a clone's container, once the snapshot is there:\n\n| stage | p50 ms | p95 ms |\n| --- | --- | --- |\n%s", stages)
	return b.discard(id)
}

// cloneStages is a table of where the time of n clones went.
func cloneStages(j *journal, n int) (string, error) {
	var table strings.Builder
	for _, stage := range []struct{ name, msg, attribute string }{
		{"memory copied and sealed", "copied the memory of a snapshot", "took"},
		{"QEMU started, state loaded", "the machine runs", "running"},
		{"machine launched, with both", "machine launched", "took"},
		{"first answer of the agent after that", "the agent answers", "took"},
		{"all of Task.Create", "container created", "all"},
	} {
		entries, err := j.entries(stage.msg, n)
		if err != nil {
			return "", err
		}
		s, err := durations(entries, stage.attribute)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(&table, s.row(stage.name))
	}
	return table.String(), nil
}

// used is how much of the store's file system is, in bytes.
func (b *bench) used() (int64, error) {
	dir := filepath.Clean(b.Config.StoreDir())
	unix.Sync()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", dir, err)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize, nil
}
