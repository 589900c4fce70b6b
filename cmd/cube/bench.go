package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/bench"
	"github.com/cubesandbox/cube/orchestrator/client"
)

func benchCommand() *cli.Command {
	return &cli.Command{
		Name:  "bench",
		Usage: "measure a server of E2B's API by a key of it",
		Description: "It asks for what users ask for, by the API and by envd, so it works with any such server. A create, fork or resume has ended when envd has answered.\n" +
			"What it makes it removes, also when it is interrupted.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "template", Value: "base", Usage: "what the sandboxes are made of"},
			&cli.StringSliceFlag{Name: "op", Usage: "measure only `OPERATION`: " + strings.Join(bench.Operations, ", ") + "; may be repeated"},
			&cli.IntFlag{Name: "count", Aliases: []string{"n"}, Value: 20, Usage: "how often each is done"},
			&cli.IntFlag{Name: "concurrency", Aliases: []string{"c"}, Value: 1, Usage: "how many are done at once"},
			&cli.StringFlag{Name: "command", Value: "true", Usage: "the `LINE` that exec has the sandbox's shell run"},
			&cli.BoolFlag{Name: "answered", Usage: "a create, fork or resume has ended when the API has answered"},
			&cli.BoolFlag{Name: "json", Usage: "as JSON"},
		},
		Action: withKey(runBench),
	}
}

// benchMost bounds what is asked for at once, and in all.
const benchMost = 100_000

func runBench(c *cli.Context, api *client.Client) error {
	o := bench.Options{
		Template: c.String("template"), Operations: c.StringSlice("op"), Count: c.Int("count"), Concurrency: c.Int("concurrency"), Command: c.String("command"),
		Answered: c.Bool("answered"), Say: sayTo(c.App.ErrWriter),
	}
	if len(o.Operations) == 0 {
		o.Operations = bench.Operations
	}
	for _, op := range o.Operations {
		if !slices.Contains(bench.Operations, op) {
			return fmt.Errorf("--op %q isn't one of %s", op, strings.Join(bench.Operations, ", "))
		}
	}
	switch {
	case c.NArg() > 0:
		return errors.New("it takes no arguments")
	case o.Count < 1 || o.Count > benchMost || o.Concurrency < 1 || o.Concurrency > benchMost:
		return fmt.Errorf("--count %d and --concurrency %d must be from 1 to %d", o.Count, o.Concurrency, benchMost)
	}
	show := showReport
	if c.Bool("json") {
		show = func(w io.Writer, rep bench.Report) error { return writeJSON(w, rep) }
	}
	rep, err := bench.Run(c.Context, api, o)
	if len(rep.Rows) > 0 { // also where it was interrupted, or something is left
		err = errors.Join(err, show(c.App.Writer, rep))
	}
	if err != nil {
		return leftAlone(c.Context, err)
	}
	failed := 0
	for _, r := range rep.Rows {
		failed += r.Failed
	}
	if failed > 0 {
		return fmt.Errorf("%d have failed", failed)
	}
	return nil
}

func showReport(w io.Writer, rep bench.Report) error {
	of := rep.Conditions
	load := of.Load
	if load == "" {
		load = "not known"
	}
	fmt.Fprintf(w, "%s, template %s, until %s has answered; from %s, load before %s; %s\n\n", of.API, of.Template, of.Until, of.Client, load, of.StartedAt.Format("2006-01-02 15:04:05Z"))
	t := newTable(w, "OPERATION", "AT ONCE", "N", "FAILED", "MEAN MS", "P50", "P95", "P99", "MAX", "PER SECOND", "TOOK S")
	for _, r := range rep.Rows {
		cells := []string{r.Operation, fmt.Sprint(r.Concurrency), fmt.Sprint(r.Count), fmt.Sprint(r.Failed)}
		if r.Count == 0 {
			t.row(append(cells, "-", "-", "-", "-", "-", "-", "-")...)
			continue
		}
		for _, ms := range []float64{r.Mean, r.P50, r.P95, r.P99, r.Max} {
			cells = append(cells, fmt.Sprintf("%.1f", ms))
		}
		t.row(append(cells, fmt.Sprintf("%.2f", r.PerSecond), fmt.Sprintf("%.1f", r.Took/1000))...)
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, r := range rep.Rows {
		for _, why := range slices.Sorted(maps.Keys(r.Failures)) {
			fmt.Fprintf(w, "%s: %d failed: %s\n", r.Operation, r.Failures[why], why)
		}
	}
	return nil
}
