package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/client"
	"github.com/cubesandbox/cube/orchestrator/probe"
)

func probeCommand() *cli.Command {
	return &cli.Command{
		Name:  "probe",
		Usage: "measure how many sandboxes the host carries that work",
		Description: "Sandboxes of a template are made step by step, each of which runs a command again and again, until that takes too long, the host is\n" +
			"hard pressed, or no more are let in. They are removed at the end, whatever comes of it. Whatever else the host does meanwhile is measured, too.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "template", Required: true, Usage: "what they are made of"},
			&cli.StringFlag{Name: "cmd", Required: true, Usage: "the `COMMAND` line that each of them runs, of its default user's shell: it is the load"},
			&cli.IntFlag{Name: "step", Value: 1, Usage: "how many are made between measurements"},
			&cli.IntFlag{Name: "max", Usage: "how many there are at most (0: as many as it takes)"},
			&cli.DurationFlag{Name: "window", Value: 10 * time.Second, Usage: "how long each number of them is measured, at least"},
			&cli.DurationFlag{Name: "p95", Usage: "what 95 of 100 runs may take (0s: --factor times the median in one sandbox)"},
			&cli.Float64Flag{Name: "factor", Value: 3, Usage: "how many times slower than in one sandbox they may be"},
			&cli.Float64Flag{Name: "cpu-pressure", Usage: "`PERCENT` of time in which something waits for CPU that is too much (0: any is well)"},
			&cli.Float64Flag{Name: "memory-pressure", Value: 20, Usage: "the same `PERCENT` for memory"},
			&cli.Float64Flag{Name: "io-pressure", Value: 60, Usage: "the same `PERCENT` for I/O"},
			&cli.DurationFlag{Name: "limit", Value: 30 * time.Minute, Usage: "how long all of it may take"},
			&cli.BoolFlag{Name: "json", Usage: "the result as JSON"},
		},
		Action: withKey(runProbe),
	}
}

func runProbe(c *cli.Context, api *client.Client) error {
	o := probe.Options{
		Template: c.String("template"), Step: c.Int("step"), Max: c.Int("max"), Window: c.Duration("window"), P95: c.Duration("p95"), Factor: c.Float64("factor"),
		CPU: c.Float64("cpu-pressure"), Memory: c.Float64("memory-pressure"), IO: c.Float64("io-pressure"), Limit: c.Duration("limit"), Timeout: at(c).cfg.Timeout,
	}
	if c.NArg() > 0 {
		return errors.New("it takes no arguments: the command is one of --cmd, in quotes")
	}
	if err := o.Check(); err != nil {
		return err
	}
	say := sayTo(c.App.ErrWriter)
	o.Tell = func(s probe.Step) {
		line := fmt.Sprintf("%d sandboxes: %d runs, p50 %v, p95 %v; the host uses %s of memory", s.Sandboxes, s.Runs, s.P50.Round(time.Millisecond), s.P95.Round(time.Millisecond), bytesSize(s.Memory))
		if p := s.Pressure; p != nil {
			line += fmt.Sprintf("; waited for CPU %.0f %%, memory %.0f %%, I/O %.0f %%", p.CPU, p.Memory, p.IO)
		}
		say(line)
	}
	p := &prober{api, c.String("cmd"), rand.Text()}
	r, err := probe.Run(c.Context, p, o)
	sctx, cancel := context.WithTimeout(context.WithoutCancel(c.Context), o.Timeout(sweepTimeout))
	defer cancel()
	if err := errors.Join(err, p.sweep(sctx)); err != nil {
		return err
	}
	if c.Bool("json") {
		return writeJSON(c.App.Writer, r)
	}
	return showProbe(c, r)
}

func showProbe(c *cli.Context, r probe.Result) error {
	load := strconv.Itoa(r.Load)
	if r.Open {
		load += " or more"
	}
	w := c.App.Writer
	t := newTable(w, "SANDBOXES OF "+r.Template, "BY")
	t.row(strconv.Itoa(r.Admission), client.Printable(fmt.Sprintf("admission (%s; short then: %s)", r.Profile, r.Short)))
	by := "this load, and the host's pressure"
	if r.Bound > 0 {
		by = fmt.Sprintf("this load (95 of 100 runs within %v), and the host's pressure", r.Bound.Round(time.Millisecond))
	}
	t.row(load, by)
	if r.Memory > 0 {
		t.row(strconv.Itoa(r.Memory), fmt.Sprintf("the host's memory, at %s for each more as measured", bytesSize(r.PerSandbox)))
	}
	t.row(strconv.Itoa(r.Worst), "the host's memory, if each takes all that its control group lets it")
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nIt ended: %s.\n", r.Ended)
	for _, d := range r.Disagree {
		fmt.Fprintf(w, "They disagree: %s.\n", d)
	}
	return nil
}

// prober is the host behind an API, and the load.
type prober struct {
	api     *client.Client
	command string
	id      string // that its sandboxes have in their metadata
}

// probeKey is the metadata of sandboxes that are made to be measured.
const probeKey = "cube.probe"

// sweepTimeout bounds the removal of what is left.
const sweepTimeout = time.Minute

// sweep removes sandboxes that were made although nobody was told any more.
func (p *prober) sweep(ctx context.Context) error {
	ids, err := p.api.Marked(ctx, probeKey, p.id)
	errs := []error{err}
	for _, id := range ids {
		errs = append(errs, p.kill(ctx, id))
	}
	return errors.Join(errs...)
}

// kill removes a sandbox. That there is none any more is no error.
func (p *prober) kill(ctx context.Context, id string) error {
	err := p.api.Kill(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Capacity is of probe.Host.
func (p *prober) Capacity(ctx context.Context, template string) (client.Capacity, error) {
	return p.api.Capacity(ctx, template)
}

// Make is of probe.Host.
func (p *prober) Make(ctx context.Context, template string, life time.Duration) (probe.Sandbox, error) {
	guest, err := p.api.Create(ctx, client.Create{TemplateID: template, Timeout: int(life / time.Second), Secure: true, Metadata: map[string]string{probeKey: p.id}})
	if err != nil {
		return nil, err
	}
	return &loaded{p, guest}, nil
}

// loaded is a sandbox with a load.
type loaded struct {
	*prober
	guest *client.Guest
}

// Run is of probe.Sandbox.
func (l *loaded) Run(ctx context.Context) error {
	code, err := l.guest.Exec(ctx, l.command)
	if err == nil && code != 0 {
		err = fmt.Errorf("%q has ended with %d in sandbox %s", l.command, code, l.guest.ID)
	}
	return err
}

// Kill is of probe.Sandbox.
func (l *loaded) Kill(ctx context.Context) error { return l.kill(ctx, l.guest.ID) }
