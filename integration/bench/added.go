package main

import (
	"fmt"
	"strings"
)

// added measures what a network adds to `ctr run` of true: machines without one, and machines with a place in it that is
// opened for them, in turn.
func (b *bench) added() error {
	kinds := []struct {
		name, network string
		routed        bool
		took          sample
	}{
		{name: "without a network", network: "none"},
		{name: "with a network, opened for it", network: `{"policy":{"default":"allow"}}`, routed: true},
	}
	args := func(kind, i int, command ...string) []string {
		return runArgs("io.cube.v2", b.id(fmt.Sprint("net", kind), i), command, "io.cube.network="+kinds[kind].network)
	}
	for kind, k := range kinds {
		r := b.Ctr(args(kind, b.n, "cat", "/proc/net/route")...)
		if r.Err != nil {
			return r.Err
		}
		if strings.Contains(r.Stdout, "eth0") != k.routed {
			return fmt.Errorf("a machine %s has the routes %q", k.name, r.Stdout)
		}
	}
	for i := range b.n {
		for kind := range kinds {
			d, err := b.timed(args(kind, i, "true")...)
			if err != nil {
				return err
			}
			kinds[kind].took = append(kinds[kind].took, d)
		}
	}
	fmt.Printf("\n### What a network adds to `ctr run --rm` of `true`\n\n| | p50 ms | p95 ms |\n| --- | --- | --- |\n")
	for _, k := range kinds {
		fmt.Println(k.took.row("io.cube.v2, " + k.name))
	}
	return nil
}
