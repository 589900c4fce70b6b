package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/client"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

func psCommand() *cli.Command {
	return &cli.Command{
		Name:  "ps",
		Usage: "list the containers that run; with $" + client.EnvAPI + ", the sandboxes of a key's team",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "all", Aliases: []string{"a"}, Usage: "containers that don't run, too"},
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "ids only"},
			&cli.BoolFlag{Name: "json", Usage: "as a JSON array; with -w, a line each"},
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "and then each that changes, until it is interrupted"},
		},
		Action: hereOrThere(withClient(psContainers), withKey(psSandboxes)),
	}
}

// listing shows rows, all at once or one by one as they change.
type listing struct {
	w           io.Writer
	quiet, json bool
	titles      []string
	widths      []int // of the columns while watching
}

func newListing(c *cli.Context, titles ...string) *listing {
	return &listing{w: c.App.Writer, quiet: c.Bool("quiet"), json: c.Bool("json"), titles: titles}
}

// line is what is shown of one.
type line struct {
	id    string
	value any
	cells []string
}

// all shows what there is.
func (l *listing) all(lines []line) error {
	switch {
	case l.quiet:
		for _, n := range lines {
			fmt.Fprintln(l.w, n.id)
		}
		return nil
	case l.json:
		values := []any{}
		for _, n := range lines {
			values = append(values, n.value)
		}
		return writeJSON(l.w, values)
	}
	t := newTable(l.w, l.titles...)
	for _, n := range lines {
		t.row(n.cells...)
	}
	return t.flush()
}

// begin shows what there is, for more to come below.
func (l *listing) begin(lines []line) error {
	l.widths = make([]int, len(l.titles))
	for _, cells := range append([][]string{l.titles}, cellsOf(lines)...) {
		for i, cell := range cells {
			l.widths[i] = max(l.widths[i], len([]rune(cell)))
		}
	}
	if !l.quiet && !l.json {
		l.put(l.titles)
	}
	return l.more(lines)
}

// more shows what has changed.
func (l *listing) more(lines []line) error {
	for _, n := range lines {
		switch {
		case l.quiet:
			fmt.Fprintln(l.w, n.id)
		case l.json:
			if err := json.NewEncoder(l.w).Encode(n.value); err != nil {
				return err
			}
		default:
			l.put(n.cells)
		}
	}
	return nil
}

func (l *listing) put(cells []string) {
	var b strings.Builder
	for i, cell := range cells {
		fmt.Fprintf(&b, "%-*s   ", l.widths[i], cell)
	}
	fmt.Fprintln(l.w, strings.TrimRight(b.String(), " "))
}

func cellsOf(lines []line) (all [][]string) {
	for _, n := range lines {
		all = append(all, n.cells)
	}
	return all
}

func psContainers(c *cli.Context, of *sandbox.Client) error {
	l := newListing(c, "ID", "IMAGE", "COMMAND", "CREATED", "STATUS", "PID")
	list := func() ([]line, error) {
		all, err := of.List(c.Context, c.Bool("all"))
		lines := make([]line, 0, len(all))
		for _, k := range all {
			lines = append(lines, line{k.ID, k, []string{k.ID, k.Image, short(strings.Join(k.Command, " "), 30), ago(k.Created), containerStatus(k), pid(k.PID)}})
		}
		return lines, err
	}
	lines, err := list()
	if err != nil || !c.Bool("watch") {
		return errors.Join(err, l.all(lines))
	}
	var failed error
	shown := map[string]line{}
	show := func(put func([]line) error) {
		lines, err := list()
		var news []line
		there := map[string]bool{}
		for _, n := range lines {
			there[n.id] = true
			if was, ok := shown[n.id]; !ok || !slices.Equal(n.cells[4:], was.cells[4:]) { // its age isn't news
				news = append(news, n)
			}
			shown[n.id] = n
		}
		for _, id := range slices.Sorted(maps.Keys(shown)) {
			if was := shown[id]; !there[id] {
				delete(shown, id)
				was.cells[4], was.cells[5] = "gone", pid(0)
				was.value = map[string]string{"id": id, "status": "gone"}
				news = append(news, was)
			}
		}
		failed = errors.Join(failed, err, put(news))
	}
	err = of.Watch(c.Context, func() { show(l.begin) }, func(string) { show(l.more) })
	return leftAlone(c.Context, errors.Join(failed, err))
}

func containerStatus(k sandbox.Container) string {
	switch {
	case k.Status == "":
		return "not running"
	case k.ExitStatus != nil:
		return fmt.Sprintf("exited (%d) %s", *k.ExitStatus, ago(*k.ExitedAt))
	case k.StoreFull:
		return k.Status + ", waits: the store is full"
	}
	return k.Status
}

func psSandboxes(c *cli.Context, api *client.Client) error {
	if c.NArg() > 0 {
		return errors.New("it takes no arguments")
	}
	l := newListing(c, "ID", "TEMPLATE", "STATE", "STARTED", "ENDS", "METADATA")
	if !c.Bool("watch") {
		all, err := api.List(c.Context)
		if err != nil {
			return err
		}
		return l.all(sandboxLines(all))
	}
	err := api.Watch(c.Context, func(change client.Change) error {
		lines := sandboxLines(change.Sandboxes)
		for _, sb := range change.Gone {
			sb.State = "gone"
			lines = append(lines, sandboxLine(sb))
		}
		if change.All {
			return l.begin(lines)
		}
		return l.more(lines)
	})
	return leftAlone(c.Context, err)
}

func sandboxLines(all []client.Sandbox) []line {
	lines := make([]line, 0, len(all))
	for _, sb := range all {
		lines = append(lines, sandboxLine(sb))
	}
	return lines
}

func sandboxLine(sb client.Sandbox) line {
	name, ends := sb.Alias, "-"
	if name == "" {
		name = sb.TemplateID
	}
	if sb.State == "running" {
		ends = "in " + units.HumanDuration(max(time.Until(sb.EndAt), 0))
	}
	var metadata []string
	for _, k := range slices.Sorted(maps.Keys(sb.Metadata)) {
		metadata = append(metadata, client.Printable(k+"="+sb.Metadata[k]))
	}
	return line{sb.ID, sb, []string{sb.ID, short(name, 30), sb.State, ago(sb.StartedAt), ends, short(strings.Join(metadata, " "), 60)}}
}
