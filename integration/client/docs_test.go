package client

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

var update = flag.Bool("update", false, "write the table into docs/conformance.md")

// The table stands between these lines of docs/conformance.md.
const (
	docsBegin = "<!-- client suite: written by go test ./integration/client -run TestDocs -update -->\n"
	docsEnd   = "<!-- client suite: end -->\n"
)

// TestDocs compares docs/conformance.md with the table.
func TestDocs(t *testing.T) {
	root, err := stack.Repository()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "docs", "conformance.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), docsBegin)
	have, after, ended := strings.Cut(rest, docsEnd)
	if !found || !ended {
		t.Fatalf("%s has no lines %q and %q", path, docsBegin, docsEnd)
	}
	want := markdown()
	if have == want {
		return
	}
	if !*update {
		t.Fatalf("%s isn't what the table says; run this test with -update", path)
	}
	if err := os.WriteFile(path, []byte(before+docsBegin+want+docsEnd+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// markdown is the table as it stands in the documentation.
func markdown() string {
	var b strings.Builder
	skipped := 0
	for _, r := range table {
		result := "pass"
		switch r.kind {
		case daemon:
			result = "pass, with a containerd of the suite's own"
		case skip:
			result = "skip: " + r.reason
			skipped++
		}
		fmt.Fprintf(&b, "| %s | %s |\n", r.name, result)
	}
	return fmt.Sprintf("%d pass, %d are skipped.\n\n| test | result |\n| --- | --- |\n%s", len(table)-skipped, skipped, &b)
}
