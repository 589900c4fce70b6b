package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// withClient runs f with a connection, and says for which command an error is.
func withClient(f func(*cli.Context, *sandbox.Client) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		client, err := sandbox.Connect(c.Context, at(c).cfg)
		if err == nil {
			defer client.Close()
			err = f(c, client)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", strings.TrimPrefix(c.Command.HelpName, "cube "), err)
		}
		return nil
	}
}

// each runs f for all arguments, and goes on after errors.
func each(f func(*cli.Context, *sandbox.Client, string) error) cli.ActionFunc {
	return withClient(func(c *cli.Context, client *sandbox.Client) error {
		if c.NArg() == 0 {
			return errors.New("it takes at least one " + c.Command.ArgsUsage)
		}
		var errs []error
		for _, arg := range c.Args().Slice() {
			errs = append(errs, f(c, client, arg))
		}
		return errors.Join(errs...)
	})
}

func stopCommand() *cli.Command {
	return &cli.Command{
		Name:      "stop",
		Usage:     "end containers, which stay to be looked at",
		ArgsUsage: "ID...",
		Flags: []cli.Flag{
			&cli.DurationFlag{Name: "timeout", Aliases: []string{"t"}, Value: 10 * time.Second, Usage: "how long it may take to end by itself"},
		},
		Action: each(func(c *cli.Context, client *sandbox.Client, id string) error {
			return recorded(c, audit.Kill, id, client.Stop(c.Context, id, c.Duration("timeout")))
		}),
	}
}

func rmCommand() *cli.Command {
	return &cli.Command{
		Name:      "rm",
		Usage:     "remove containers with their disks and logs",
		ArgsUsage: "ID...",
		Flags:     []cli.Flag{&cli.BoolFlag{Name: "force", Aliases: []string{"f"}, Usage: "kill those that run"}},
		Action: each(func(c *cli.Context, client *sandbox.Client, id string) error {
			return recorded(c, audit.Kill, id, client.Remove(c.Context, id, c.Bool("force")))
		}),
	}
}

func imageCommand() *cli.Command {
	return &cli.Command{
		Name:   "image",
		Usage:  "handle images",
		Action: noCommand("image"),
		Subcommands: []*cli.Command{
			{
				Name:      "import",
				Usage:     "take images from a Docker or OCI archive; - is stdin",
				ArgsUsage: "FILE|-",
				Flags:     []cli.Flag{&cli.StringFlag{Name: "name", Usage: "a name for the image, beside those that the archive has"}},
				Action:    withClient(importAction),
			},
			{
				Name:      "pull",
				Usage:     "take an image from its registry",
				ArgsUsage: "REFERENCE",
				Flags:     []cli.Flag{registryUserFlag()},
				Action:    withClient(pullAction),
			},
			{
				Name:  "ls",
				Usage: "list the images",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "names only"},
					&cli.BoolFlag{Name: "json", Usage: "as a JSON array"},
				},
				Action: withClient(imageListAction),
			},
			{
				Name:      "rm",
				Usage:     "remove images",
				ArgsUsage: "IMAGE...",
				Action: each(func(c *cli.Context, client *sandbox.Client, name string) error {
					return client.RemoveImage(c.Context, name)
				}),
			},
		},
	}
}

func importAction(c *cli.Context, client *sandbox.Client) error {
	if c.NArg() != 1 {
		return errors.New("it takes one archive, or - for stdin")
	}
	name := c.Args().First()
	var r io.Reader = os.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		r = f
	}
	names, err := client.Import(c.Context, readUntil(c.Context, r), sandbox.ImportOptions{Name: c.String("name"), Progress: reporter(sayTo(os.Stderr))})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, n := range names {
		fmt.Fprintln(c.App.Writer, n)
	}
	return nil
}

// readUntil is a reader that ends with ctx, too: a pipe or a terminal that nothing comes from keeps its own waiting.
func readUntil(ctx context.Context, r io.Reader) io.Reader {
	out, in := io.Pipe()
	go func() {
		_, err := io.Copy(in, r)
		in.CloseWithError(err)
	}()
	context.AfterFunc(ctx, func() { in.CloseWithError(context.Cause(ctx)) })
	return out
}

func registryUserFlag() cli.Flag {
	return &cli.StringFlag{Name: "user", Usage: "`NAME[:PASSWORD]` for the registry; the password may be in $CUBE_REGISTRY_PASSWORD"}
}

// registryUser is whom a registry is asked as, "" for nobody.
func registryUser(c *cli.Context) (user, password string) {
	user, password, ok := strings.Cut(c.String("user"), ":")
	if user != "" && !ok {
		password = os.Getenv("CUBE_REGISTRY_PASSWORD")
	}
	return user, password
}

func pullAction(c *cli.Context, client *sandbox.Client) error {
	if c.NArg() != 1 {
		return errors.New("it takes one image")
	}
	o := sandbox.PullOptions{Progress: reporter(sayTo(os.Stderr))}
	o.User, o.Secret = registryUser(c)
	name, err := client.Pull(c.Context, c.Args().First(), o)
	if err != nil {
		return err
	}
	fmt.Fprintln(c.App.Writer, name)
	return nil
}

func imageListAction(c *cli.Context, client *sandbox.Client) error {
	list, err := client.Images(c.Context)
	if err != nil {
		return err
	}
	w := c.App.Writer
	switch {
	case c.Bool("quiet"):
		for _, i := range list {
			fmt.Fprintln(w, i.Name)
		}
		return nil
	case c.Bool("json"):
		return writeJSON(w, list)
	}
	t := newTable(w, "NAME", "DIGEST", "SIZE", "CREATED", "PLATFORMS", "UNPACKED")
	for _, i := range list {
		t.row(i.Name, short(i.Digest.Encoded(), 12), units.BytesSize(float64(i.Size)), ago(i.Created), strings.Join(i.Platforms, ","), yesNo(i.Unpacked))
	}
	return t.flush()
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table writes aligned columns.
type table struct{ *tabwriter.Writer }

func newTable(w io.Writer, titles ...string) table {
	t := fields(w)
	t.row(titles...)
	return t
}

// fields is a table of names and values, without titles.
func fields(w io.Writer) table { return table{tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)} }

func (t table) row(cells ...string) { fmt.Fprintln(t.Writer, strings.Join(cells, "\t")) }

func (t table) flush() error { return t.Flush() }

func ago(t time.Time) string { return units.HumanDuration(time.Since(t)) + " ago" }

// short cuts what is too long for a column, at a character's border.
func short(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

func pid(n uint32) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
