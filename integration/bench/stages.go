package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// stages prints where the time of the machines' creation went, from what the shims have logged since offset from.
func (b *bench) stages(log string, from int64) error {
	text, err := os.ReadFile(log)
	if err != nil {
		return err
	}
	var order []string
	samples := map[string]sample{}
	for line := range strings.Lines(string(text[from:])) {
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
	if len(order) == 0 {
		return fmt.Errorf("no stages in %s", log)
	}
	fmt.Printf("\nStages of Task.Create (`all`), from the shims' logs:\n\n| stage | p50 ms | p95 ms |\n| --- | --- | --- |\n")
	for _, name := range order {
		fmt.Println(samples[name].row(name))
	}
	return nil
}

// duration finds name=12.3ms, quoted or not.
var duration = regexp.MustCompile(`\b([a-z_]+)="?([0-9.]+(?:ns|µs|ms|s))\b`)
