package conformance

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var updateDocs = flag.Bool("update", false, "rewrite the table in docs/conformance.md")

const (
	docs    = "../../docs/conformance.md"
	heading = "## Our own suite\n"
)

// TestDocs: the table in the documentation is the one that the tests have, so that what it says passes has to.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), heading)
	if !ok {
		t.Fatalf("%s has no section %q", docs, heading)
	}
	section, after := rest, ""
	if i := strings.Index(rest, "\n## "); i >= 0 {
		section, after = rest[:i+1], rest[i+1:]
	}
	text, _, ok := strings.Cut(section, "| row |")
	if !ok {
		t.Fatalf("%s: section %q has no table", docs, heading)
	}
	rows := markdown() // nothing follows it in the section
	if after != "" {
		rows += "\n"
	}
	if want := before + heading + text + rows + after; want != string(b) {
		if !*updateDocs {
			t.Fatalf("%s doesn't have the table of the tests: go test ./integration/conformance -run TestDocs -update", docs)
		}
		if err := os.WriteFile(docs, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// markdown is the table.
func markdown() string {
	var s strings.Builder
	s.WriteString("| row | fake machine | QEMU |\n| --- | --- | --- |\n")
	for _, g := range table {
		for _, r := range g.rows {
			cell := func(why string) string {
				if why == "" {
					return "pass"
				}
				return "skipped: " + why
			}
			qemu := cell(r.noQEMU)
			if r.long {
				qemu += " (long form only)"
			}
			fmt.Fprintf(&s, "| %s/%s | %s | %s |\n", g.name, r.name, cell(r.noFake), qemu)
		}
	}
	return s.String()
}
