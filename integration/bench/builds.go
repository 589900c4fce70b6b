package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/undo"
)

const (
	localBase = "cube.local/base:bookworm"
	repo      = "/base:bookworm"
)

// phases of a build, as its log tells them.
var phases = []struct {
	name string
	line *regexp.Regexp // whose group is the time it has taken, in seconds
}{
	{"pull, from a registry on this host", regexp.MustCompile(`base: pulling .*: ([\d.]+) s$`)},
	{"unpack to a disk", regexp.MustCompile(`base: unpacking .*: ([\d.]+) s$`)},
	{"`RUN` that does nothing, disk kept", regexp.MustCompile(` 1: done after ([\d.]+) s$`)},
	{"`RUN` that writes 50 MB, disk kept", regexp.MustCompile(` 2: done after ([\d.]+) s$`)},
	{"save", regexp.MustCompile(`finalize: saved in ([\d.]+) s$`)},
	{"proof: a sandbox, DNS, dial, ready", regexp.MustCompile(`finalize: proved in ([\d.]+) s$`)},
	{"all of it", regexp.MustCompile(`finalize: ready after ([\d.]+) s$`)},
}

// whole is which of the phases has all of them.
var whole = len(phases) - 1

// templates measures builds of a template by phase, on a stack of its own: of an image that is pulled first, of one that is here, and
// with all steps in the cache.
func templates(ctx context.Context, root string, n int) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	cert, err := trust(&u)
	if err != nil {
		return err
	}
	s, err := stack.Start(root)
	if s != nil { // with an error, too
		u.Push(s.Stop)
	}
	if err != nil {
		return err
	}
	b := &bench{Stack: s, n: max(3, n/6)}
	b.conditions()
	if err := serveRegistry(s, cert, &u); err != nil {
		return err
	}
	if _, _, err := b.must("image", "import", filepath.Join(stack.Cache(), "images", "base-bookworm.tar")); err != nil {
		return err
	}
	if r := b.Ctr("image", "push", "--plain-http", plainRegistry+repo, localBase); r.Err != nil {
		return r.Err
	}
	if _, _, err := b.must("image", "rm", localBase); err != nil {
		return err
	}
	kinds := []struct {
		name  string
		args  []string
		again bool // the image is pulled again
		took  []sample
	}{{"cold", []string{"--force"}, true, nil}, {"image here", []string{"--force"}, false, nil}, {"all steps cached", nil, false, nil}}
	load := loadNow()
	for i := range b.n {
		for k := range kinds {
			kind := &kinds[k]
			if kind.took == nil {
				kind.took = make([]sample, len(phases))
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if kind.again && i > 0 {
				if err := b.forget(); err != nil {
					return err
				}
			}
			if err := b.build(kind.took, kind.args...); err != nil {
				return fmt.Errorf("%s: %w", kind.name, err)
			}
		}
	}
	fmt.Printf("\n## A template's build, by phase\n\n1 vCPU, 512 MiB, of an image of 112 MB; medians of %d, in turns; s; load before %s.\n\n| |", b.n, load)
	for _, kind := range kinds {
		fmt.Printf(" %s |", kind.name)
	}
	fmt.Printf("\n|%s\n", strings.Repeat(" --- |", len(kinds)+1))
	for i, p := range phases {
		if i == whole {
			fmt.Print("| machines begin, and envd in them |")
			for _, kind := range kinds {
				fmt.Printf(" %.1f |", rest(kind.took).Seconds())
			}
			fmt.Println()
		}
		fmt.Printf("| %s |", p.name)
		for _, kind := range kinds {
			if len(kind.took[i]) == 0 {
				fmt.Print(" - |")
				continue
			}
			fmt.Printf(" %.1f |", kind.took[i].quantile(0.5).Seconds())
		}
		fmt.Println()
	}
	return nil
}

// rest is the median of what none of the phases has.
func rest(took []sample) time.Duration {
	var left sample
	for i, d := range took[whole] {
		for _, of := range took[:whole] {
			if len(of) > 0 {
				d -= of[i]
			}
		}
		left = append(left, d)
	}
	return left.quantile(0.5)
}

// forget removes the template and its image, so that both have to be made anew.
func (b *bench) forget() error {
	if _, _, err := b.must("template", "rm", "phases"); err != nil {
		return err
	}
	_, _, err := b.must("image", "rm", registryName+repo)
	return err
}

// build builds the template, and notes how long its phases have taken.
func (b *bench) build(took []sample, args ...string) error {
	args = append([]string{"template", "build", "--cpus", "1", "--memory", "512", "--step", "true", "--step", "head -c 50M /dev/urandom > /var/data"}, args...)
	r := b.Cube(append(args, "phases", registryName+repo)...)
	if r.Err != nil {
		return r.Err
	}
	for i, p := range phases {
		for line := range strings.Lines(r.Stderr) {
			m := p.line.FindStringSubmatch(strings.TrimSpace(line))
			if m == nil {
				continue
			}
			seconds, err := strconv.ParseFloat(m[1], 64)
			if err != nil {
				return err
			}
			took[i] = append(took[i], time.Duration(seconds*float64(time.Second)))
		}
	}
	if n := len(took[whole]); n == 0 || n > b.n {
		return fmt.Errorf("it doesn't say how long it has taken: %s", r.Stderr)
	}
	return nil
}
