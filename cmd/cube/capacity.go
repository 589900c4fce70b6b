package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/client"
)

func capacityCommand() *cli.Command {
	return &cli.Command{
		Name:  "capacity",
		Usage: "show what there is room for, by the API's key",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "template", Usage: "of that one alone"},
			&cli.BoolFlag{Name: "json", Usage: "as JSON"},
		},
		Action: withKey(func(c *cli.Context, api *client.Client) error {
			if c.NArg() > 0 {
				return errors.New("it takes no arguments: --template is of one template, and `cube capacity probe` measures")
			}
			told, err := api.Capacity(c.Context, c.String("template"))
			if err != nil {
				return err
			}
			if c.Bool("json") {
				return writeJSON(c.App.Writer, told)
			}
			return showCapacity(c, told)
		}),
		Subcommands: []*cli.Command{probeCommand()},
	}
}

func showCapacity(c *cli.Context, told client.Capacity) error {
	w := c.App.Writer
	t := newTable(w, "", "TOTAL", "RESERVED", "USED", "FREE")
	for _, of := range []struct {
		what string
		client.Resource
		say func(float64) string
	}{{"CPUs", told.CPU, cpus}, {"memory", told.Memory, floatSize}, {"disk", told.Disk, floatSize}} {
		t.row(of.what, of.say(of.Total), of.say(of.Reserved), of.say(of.Used), of.say(of.Free))
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%d sandboxes run, %d are paused.", told.Running, told.Paused)
	if s := told.Spare; s != (client.Amount{}) {
		fmt.Fprintf(w, " %s CPUs and %s of memory are reserved for machines that are kept ready.", cpus(s.CPU), bytesSize(s.Memory))
	}
	if p := told.Pressure; p != nil {
		fmt.Fprintf(w, " Of the last ten seconds something has waited for CPU in %.0f %%, memory %.0f %%, I/O %.0f %%.", p.CPU, p.Memory, p.IO)
	}
	used, limits := told.Team.Used, told.Team.Limits
	fmt.Fprintf(w, "\nTeam %s runs %s sandboxes with %s vCPUs and %s of memory, and has %s of disk.\n\n", client.Printable(told.Team.ID), of(used.Running, limits.Running, strconv.Itoa), of(used.VCPUs, limits.VCPUs, strconv.Itoa),
		of(used.Memory, limits.Memory, bytesSize), of(used.Disk, limits.Disk, bytesSize))
	t = newTable(w, "TEMPLATE", "PROFILE", "VCPUS", "MEMORY", "RESERVED", "ROOM", "SHORT")
	for _, r := range told.Templates {
		name := r.TemplateID
		if len(r.Names) > 0 {
			name = strings.Join(r.Names, ", ")
		}
		t.row(client.Printable(name), client.Printable(r.Profile), strconv.Itoa(r.CPUs), bytesSize(int64(r.MemoryMB)<<20),
			fmt.Sprintf("%s CPUs, %s, %s", cpus(r.Reserved.CPU), bytesSize(r.Reserved.Memory), bytesSize(r.Reserved.Disk)), strconv.Itoa(r.Count), client.Printable(r.Short))
	}
	if err := t.flush(); err != nil || len(told.Templates) == 0 {
		return err
	}
	fmt.Fprintln(w)
	for _, line := range advice(told) {
		fmt.Fprintln(w, client.Printable(line))
	}
	return nil
}

// knobs are the settings that decide how many are let in, by what is short then.
var knobs = map[string]string{
	"host_cpu":        "all CPUs are reserved then: admission.cpu_overcommit, for disposable ones",
	"host_memory":     "all memory is reserved then: admission.memory_overcommit and admission.disposable_memory, for disposable ones",
	"host_available":  "what others use and what is reserved for each leave memory for no more: admission.disposable_memory, admission.memory_headroom",
	"host_disk":       "the store is full then, or all of it reserved: admission.disk_overcommit, store.size",
	"pressure_memory": "nothing is started while the host is this short of memory: admission.memory_pressure",
	"pressure_io":     "nothing is started while the host waits for I/O this much: admission.io_pressure",
	"pressure_cpu":    "nothing is started while the host's CPUs are wanted this much: admission.cpu_pressure",
}

// busy is the part of the host's CPUs from which on no more are left for sandboxes that work.
const busy = 0.9

// advice says what the numbers of sandboxes mean, which setting makes each, and where what is used contradicts what is reserved.
func advice(told client.Capacity) (lines []string) {
	shorts := map[string]bool{}
	for _, r := range told.Templates {
		shorts[r.Short] = true
	}
	for _, short := range slices.Sorted(maps.Keys(shorts)) {
		if limit, ok := strings.CutPrefix(short, "team_"); ok {
			lines = append(lines, fmt.Sprintf("%s: the team has what it may: limits.%s", short, limit))
		} else if knob := knobs[short]; knob != "" {
			lines = append(lines, short+": "+knob)
		}
	}
	lines = append(lines, "ROOM is by what is reserved for each, whatever they do: `cube capacity probe` measures how many carry a load of yours.")
	if c := told.CPU; told.Running > 0 && c.Used >= busy*c.Total && c.Reserved < busy*c.Total {
		lines = append(lines, fmt.Sprintf("They disagree: %s CPUs are reserved, but %s of %s are in use: more sandboxes make all of them slower. Lower admission.cpu_overcommit, or set admission.cpu_pressure.",
			cpus(c.Reserved), cpus(c.Used), cpus(c.Total)))
	}
	return lines
}

// of is a number, of the most that it may be unless that is 0.
func of[T int | int64](n, most T, say func(T) string) string {
	if most == 0 {
		return say(n)
	}
	return say(n) + " of " + say(most)
}

func cpus(n float64) string { return strconv.FormatFloat(n, 'f', 2, 64) }

func floatSize(n float64) string { return bytesSize(int64(n)) }
