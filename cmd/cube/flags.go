package main

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// flagsFirst puts the flags of a command line before its other arguments, which is where the library looks for them. What
// follows `--` stays, and so does everything of commands whose arguments end with somebody else's command line.
func flagsFirst(app *cli.App, args []string) []string {
	if len(args) == 0 {
		return args
	}
	flags, commands := app.Flags, app.Commands
	for n := 1; n < len(args); n++ {
		if arg := args[n]; strings.HasPrefix(arg, "-") {
			if takesNext(flags, arg) {
				n++
			}
			continue
		}
		i := slices.IndexFunc(commands, func(c *cli.Command) bool { return c.HasName(args[n]) })
		if i < 0 || slices.Contains([]string{"run", "exec", "ssh"}, commands[i].Name) {
			return args
		}
		flags, commands = commands[i].Flags, commands[i].Subcommands
		if len(commands) == 0 {
			return append(slices.Clone(args[:n+1]), sorted(flags, args[n+1:])...)
		}
	}
	return args
}

// sorted is the arguments of a command with its flags first.
func sorted(flags []cli.Flag, args []string) []string {
	var first, rest []string
	for n := 0; n < len(args); n++ {
		switch arg := args[n]; {
		case arg == "--":
			return append(append(append(first, "--"), rest...), args[n+1:]...)
		case arg == "-" || !strings.HasPrefix(arg, "-"):
			rest = append(rest, arg)
		default:
			first = append(first, arg)
			if takesNext(flags, arg) && n+1 < len(args) {
				n++
				first = append(first, args[n])
			}
		}
	}
	return append(first, rest...)
}

// takesNext tells whether the argument after a flag is its value. Of short ones in one argument it is the last that may have one.
func takesNext(flags []cli.Flag, arg string) bool {
	name := strings.TrimLeft(arg, "-")
	if strings.Contains(name, "=") {
		return false
	}
	if !strings.HasPrefix(arg, "--") && len(name) > 1 {
		name = name[len(name)-1:]
	}
	for _, f := range flags {
		if v, ok := f.(cli.DocGenerationFlag); ok && slices.Contains(f.Names(), name) {
			return v.TakesValue()
		}
	}
	return false
}
