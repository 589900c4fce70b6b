package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/doctor"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "tell whether this host can run the stack, and what the stack has left on it",
		Description: "Each line is a level, what was looked at, what was found, and the remedy. The levels: ok; warn; fail keeps the stack\n" +
			"from working; left is something of the stack that nobody owns any more. With fail or left the exit code is 1.\n" +
			"With --fix, what is left is removed, each with a line fixed, or warn and why not; then all is looked at again.",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "fix", Usage: "remove what is left; nothing that a container, a shim or another stack owns"},
			&cli.BoolFlag{Name: "json", Usage: "as a JSON array"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("doctor takes no arguments")
			}
			cfg := at(c).cfg
			var findings []doctor.Finding
			if c.Bool("fix") {
				if os.Geteuid() != 0 {
					return errors.New("doctor --fix needs root: use sudo")
				}
				findings = doctor.Fix(c.Context, cfg)
			}
			findings = append(findings, doctor.Judge(cfg, doctor.Gather(c.Context, cfg))...)
			var err error
			if c.Bool("json") {
				err = writeJSON(c.App.Writer, findings)
			} else {
				err = doctor.Write(c.App.Writer, findings)
			}
			if err != nil {
				return err
			}
			return verdict(findings)
		},
	}
}

// verdict is the error that says what is wrong in all.
func verdict(findings []doctor.Finding) error {
	var wrong []string
	for _, w := range []struct {
		level     doctor.Level
		one, many string
	}{
		{doctor.Fail, "1 finding keeps the stack from working", "%d findings keep the stack from working"},
		{doctor.Left, "1 thing is left that nobody owns", "%d things are left that nobody owns"},
	} {
		switch n := doctor.Count(findings, w.level); n {
		case 0:
		case 1:
			wrong = append(wrong, w.one)
		default:
			wrong = append(wrong, fmt.Sprintf(w.many, n))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("doctor: %s: see the remedies above", strings.Join(wrong, " and "))
}
