package stack

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
)

const (
	tailBytes = 8 << 10 // of a log that are looked at
	tailLines = 3       // of those that are shown
	tailWidth = 300     // bytes of each line
)

// logTail is the last lines of a log that were written after the offset from, on one line for an error message, with
// the name of the file.
func logTail(path string, from int64) string {
	nothing := fmt.Sprintf("nothing in %s", path)
	f, err := os.Open(path)
	if err != nil {
		return nothing
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nothing
	}
	b, err := io.ReadAll(io.NewSectionReader(f, max(from, end-tailBytes), tailBytes))
	if err != nil {
		return nothing
	}
	var lines []string
	for line := range bytes.Lines(b) {
		if line = bytes.TrimSpace(line); len(line) > 0 {
			lines = append(lines, string(line[:min(len(line), tailWidth)]))
		}
	}
	if len(lines) == 0 {
		return nothing
	}
	return fmt.Sprintf("%s (%s)", strings.Join(lines[max(0, len(lines)-tailLines):], " | "), path)
}
