package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// journal is what containerd and the shims log from a moment on.
type journal struct {
	path string
	from int64
	wait time.Duration
}

// entry is the attributes of one message.
type entry map[string]string

func (b *bench) journal() (*journal, error) {
	path := filepath.Join(b.Config.LogDir(), "containerd.log")
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	return &journal{path: path, from: st.Size(), wait: b.Config.Timeout(10 * time.Second)}, nil
}

var attribute = regexp.MustCompile(`\b([a-z_]+)=("(?:[^"\\]|\\.)*"|\S+)`)

// entries are the n messages of that text. They may come a little later than what they tell of: a shim's go through
// containerd.
func (j *journal) entries(msg string, n int) ([]entry, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(j.wait); ; <-tick.C {
		text, err := os.ReadFile(j.path)
		if err != nil {
			return nil, err
		}
		var all []entry
		for line := range strings.Lines(string(text[j.from:])) {
			if !strings.HasSuffix(line, "\n") || !strings.Contains(line, fmt.Sprintf("msg=%q", msg)) {
				continue
			}
			e := entry{}
			for _, m := range attribute.FindAllStringSubmatch(line, -1) {
				e[m[1]] = strings.Trim(m[2], `"`)
			}
			all = append(all, e)
		}
		if len(all) == n {
			return all, nil
		}
		if len(all) > n || time.Now().After(end) {
			return nil, fmt.Errorf("%d times %q in %s, not %d", len(all), msg, j.path, n)
		}
	}
}

// durations are what an attribute says in all entries.
func durations(entries []entry, name string) (sample, error) {
	var s sample
	for _, e := range entries {
		d, err := time.ParseDuration(e[name])
		if err != nil {
			return nil, fmt.Errorf("%s of a log entry: %w", name, err)
		}
		s = append(s, d)
	}
	return s, nil
}
