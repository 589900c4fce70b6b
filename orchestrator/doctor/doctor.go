// Package doctor tells whether this host can run Cube and what to do where it can't, and what a stack has left on it. It looks (Gather) and judges
// (Judge) in two steps, so that what it says of a host is the same whoever has looked.
package doctor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Level is how bad a finding is.
type Level string

// The levels. Fail says that the stack can't work, Left that something is on the host that nobody owns any more, and
// Fixed that it has been removed.
const (
	OK    Level = "ok"
	Warn  Level = "warn"
	Fail  Level = "fail"
	Left  Level = "left"
	Fixed Level = "fixed"
)

// Finding is one line of the diagnosis.
type Finding struct {
	Level  Level  `json:"level"`
	Name   string `json:"name"`
	Detail string `json:"detail"`
	// Remedy is what to do about it; "" when all is well.
	Remedy string `json:"remedy,omitempty"`
	// Since is when something was left, and Bytes the disk space that it takes, where they are known.
	Since *time.Time `json:"since,omitempty"`
	Bytes int64      `json:"bytes,omitempty"`
}

// Count counts the findings of a level.
func Count(findings []Finding, l Level) (n int) {
	for _, f := range findings {
		if f.Level == l {
			n++
		}
	}
	return n
}

// Write prints one line per finding.
func Write(w io.Writer, findings []Finding) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range findings {
		line := strings.Join([]string{string(f.Level), f.Name, f.Detail}, "\t")
		if f.Remedy != "" {
			line += " — " + f.Remedy
		}
		fmt.Fprintln(t, line)
	}
	return t.Flush()
}
