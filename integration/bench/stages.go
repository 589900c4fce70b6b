package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// stages prints where the time of the machines' creation went, from what containerd and the shims have logged since
// offset from.
func (b *bench) stages(log string, from int64) error {
	text, err := os.ReadFile(log)
	if err != nil {
		return err
	}
	order := []string{"snapshot prepare", "shim start"}
	samples := map[string]sample{}
	began := map[string]time.Time{} // stages under way; runs come one after the other
	for line := range strings.Lines(string(text[from:])) {
		if m := moment.FindStringSubmatch(line); m != nil && strings.Contains(line, b.Name()+"-run-") {
			now, err := time.Parse(time.RFC3339Nano, m[1])
			if err != nil {
				return err
			}
			stage, ends := moments[m[2]].stage, moments[m[2]].ends
			switch from, ok := began[stage]; {
			case !ends:
				began[stage] = now
			case ok:
				samples[stage] = append(samples[stage], now.Sub(from))
				delete(began, stage)
			}
		}
		_, fields, ok := strings.Cut(line, "container created")
		if !ok {
			continue
		}
		for _, m := range duration.FindAllStringSubmatch(fields, -1) {
			d, err := time.ParseDuration(m[2])
			if err != nil {
				continue
			}
			if samples[m[1]] == nil {
				order = append(order, m[1])
			}
			samples[m[1]] = append(samples[m[1]], d)
		}
	}
	if len(order) == 2 {
		return fmt.Errorf("no stages in %s", log)
	}
	fmt.Printf("\nStages, from the logs of containerd and the shims (`all`: Task.Create; `machine`: restore from the base snapshot with the root disk; " +
		"`guest`: the agent answers and has its identity; `container`: mount, crun create):\n\n| stage | p50 ms | p95 ms |\n| --- | --- | --- |\n")
	for _, name := range order {
		if len(samples[name]) > 0 {
			fmt.Println(samples[name].row(name))
		}
	}
	return nil
}

var (
	// duration finds name=12.3ms, quoted or not.
	duration = regexp.MustCompile(`\b([a-z_]+)="?([0-9.]+(?:ns|µs|ms|s))\b`)
	// moments are what containerd logs when stages of its own begin and end.
	moments = map[string]struct {
		stage string
		ends  bool
	}{
		"prepare snapshot":    {"snapshot prepare", false},
		"get snapshot mounts": {"snapshot prepare", true},
		"creating task":       {"shim start", false},
		"connecting to shim":  {"shim start", true},
	}
	// moment finds when.
	moment = regexp.MustCompile(`^time="?([^" ]+)"? .*msg="(prepare snapshot|get snapshot mounts|creating task|connecting to shim)`)
)
