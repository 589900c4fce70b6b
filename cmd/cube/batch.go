package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/client"
)

func batchCommand() *cli.Command {
	return &cli.Command{
		Name:      "batch",
		Usage:     "run a command in many sandboxes, each its own, by the API's key",
		ArgsUsage: "-- COMMAND [ARG...]",
		Description: "One argument is a line for the sandbox's shell; more are the words of one. There are as many sandboxes at once as there is room for, and\n" +
			"none is left, also when this is interrupted. A line for each item comes as it ends; the exit code is 0 if all of them ended with 0.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "template", Usage: "what the sandboxes are made of"},
			&cli.IntFlag{Name: "count", Aliases: []string{"n"}, Usage: "how many items there are; with --env-file, as many as it has lines"},
			&cli.StringFlag{Name: "env-file", Usage: "`FILE` with a line of JSON for each item, {\"KEY\": \"VALUE\"}: its variables; - is stdin"},
			&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "set `KEY=VALUE` in all of them, or take KEY's value from here; may be repeated"},
			&cli.StringSliceFlag{Name: "metadata", Usage: "`KEY=VALUE` of all the sandboxes; may be repeated"},
			&cli.DurationFlag{Name: "timeout", Usage: "how long an item's command may run", DefaultText: "5m"},
			&cli.DurationFlag{Name: "deadline", Usage: "how long all of them may take", DefaultText: "1h"},
			&cli.IntFlag{Name: "concurrency", Usage: "how many sandboxes there are at once, at most", DefaultText: "16"},
			&cli.BoolFlag{Name: "no-internet", Usage: "let them reach nothing"},
			&cli.BoolFlag{Name: "json", Usage: "a line of JSON for each item, with all that it has written"},
		},
		Action: withKey(runBatch),
	}
}

func runBatch(c *cli.Context, api *client.Client) error {
	r, err := batchRequest(c)
	if err != nil {
		return err
	}
	show := showResult
	if c.Bool("json") {
		show = func(w io.Writer, r client.BatchResult) error { return json.NewEncoder(w).Encode(r) }
	} else {
		fmt.Fprintln(c.App.Writer, strings.TrimSpace(fmt.Sprintf(resultForm, "ITEM", "STATUS", "EXIT", "WAITED", "MADE", "RAN", "SANDBOX", "SAYS")))
	}
	sum, err := api.Batch(c.Context, r, func(r client.BatchResult) error { return show(c.App.Writer, r) })
	if err != nil {
		return leftAlone(c.Context, err)
	}
	say := sayTo(c.App.ErrWriter)
	say(fmt.Sprintf("%d items in %v: %d ok, %d failed, %d refused, %d ran for too long", sum.Count, milliseconds(sum.TookMS), sum.OK, sum.Failed, sum.Refused, sum.Timeout))
	if sum.OK != sum.Count {
		return exitCode(1)
	}
	return nil
}

const resultForm = "%-6v %-8s %-5s %-8v %-8v %-8v %-21s %s"

// showResult shows one as a line of a table.
func showResult(w io.Writer, r client.BatchResult) error {
	exit, says := "-", lastLine(r.Stdout)
	if r.ExitCode != nil {
		exit = fmt.Sprint(*r.ExitCode)
	}
	if r.Status != client.BatchOK {
		says = r.Error
		if line := lastLine(r.Stderr); line != "" {
			says += ": " + line
		}
	}
	sandbox := r.SandboxID
	if sandbox == "" {
		sandbox = "-"
	}
	line := fmt.Sprintf(resultForm, r.Index, r.Status, exit, milliseconds(r.WaitMS), milliseconds(r.CreateMS), milliseconds(r.RunMS), sandbox, short(says, 200))
	_, err := fmt.Fprintln(w, strings.TrimRight(client.Printable(line), " "))
	return err
}

// lastLine is the last line that has something in it.
func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return strings.TrimSpace(s[strings.LastIndexByte(s, '\n')+1:])
}

func milliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func batchRequest(c *cli.Context) (client.BatchRequest, error) {
	r := client.BatchRequest{Template: c.String("template"), Count: c.Int("count"), Concurrency: c.Int("concurrency"), Command: shellLine(c.Args().Slice())}
	switch {
	case r.Template == "":
		return r, errors.New("--template says what the sandboxes are made of")
	case c.NArg() == 0:
		return r, errors.New("it takes a command, after --")
	case r.Count == 0 && c.String("env-file") == "":
		return r, errors.New("--count or --env-file says how many items there are")
	}
	for flag, seconds := range map[string]*int{"timeout": &r.Timeout, "deadline": &r.Deadline} {
		d := c.Duration(flag)
		if c.IsSet(flag) && d < time.Second {
			return r, fmt.Errorf("--%s %v must be a second at least", flag, d)
		}
		*seconds = int((d + time.Second - 1) / time.Second)
	}
	if c.Bool("no-internet") {
		r.AllowInternet = new(bool)
	}
	var err error
	if r.EnvVars, err = pairs(c, "env", os.LookupEnv); err != nil {
		return r, err
	}
	if r.Metadata, err = pairs(c, "metadata", nil); err != nil {
		return r, err
	}
	if file := c.String("env-file"); file != "" {
		if r.Envs, err = readEnvs(file, c.App.Reader); err != nil {
			return r, fmt.Errorf("--env-file: %w", err)
		}
	}
	return r, nil
}

// pairs are those of a flag. A bare KEY is looked up, if there is where.
func pairs(c *cli.Context, flag string, lookup func(string) (string, bool)) (map[string]string, error) {
	all := map[string]string{}
	for _, pair := range c.StringSlice(flag) {
		key, value, ok := strings.Cut(pair, "=")
		if !ok && lookup != nil {
			if value, ok = lookup(key); !ok {
				return nil, fmt.Errorf("--%s %s: the variable isn't set here", flag, key)
			}
		}
		if !ok || key == "" {
			return nil, fmt.Errorf("--%s %q is not KEY=VALUE", flag, pair)
		}
		all[key] = value
	}
	return all, nil
}

// envLine bounds a line of a file of variables, in bytes.
const envLine = 1 << 20

// readEnvs reads the items' variables, a JSON object in each line. Empty lines are none.
func readEnvs(file string, stdin io.Reader) (all []map[string]string, err error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		stdin = f
	}
	lines := bufio.NewScanner(stdin)
	lines.Buffer(nil, envLine)
	n := 1
	for ; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			continue
		}
		var env map[string]string
		if err := json.Unmarshal([]byte(line), &env); err != nil || env == nil {
			return nil, fmt.Errorf(`line %d isn't a JSON object of strings, like {"KEY": "VALUE"}`, n)
		}
		all = append(all, env)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("line %d has %d bytes or more: the API takes no more in all", n, envLine)
	case err != nil:
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("there is nothing in it")
	}
	return all, nil
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// shellLine is a command line for a shell: the one argument that there is, or words.
func shellLine(args []string) string {
	if len(args) == 1 {
		return args[0]
	}
	words := make([]string, len(args))
	for i, a := range args {
		if words[i] = a; !plainWord.MatchString(a) {
			words[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}
