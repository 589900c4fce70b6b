package share

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"os"
	"strings"
)

const (
	// maxLine and maxLines bound what a helper says, if a guest has taken it over, in the caller's log.
	maxLine  = 512
	maxLines = 100
)

// output is what a helper writes to its standard output and error: nothing, unless something is wrong.
type output struct {
	done chan struct{}
	text string // the last line; after done
}

// readOutput reads and closes r.
func readOutput(r *os.File, log *slog.Logger) *output {
	o := &output{done: make(chan struct{}), text: "cube-share has ended without a word"}
	go func() {
		defer close(o.done)
		defer r.Close()
		lines := bufio.NewReaderSize(r, maxLine)
		for range maxLines {
			line, err := lines.ReadSlice('\n') // a longer line comes in parts
			if s := printable(line); s != "" {
				o.text = s
				log.Warn(s)
			}
			if err != nil && err != bufio.ErrBufferFull {
				return
			}
		}
		_, _ = io.Copy(io.Discard, lines)
	}()
	return o
}

// last waits for the output's end, which comes with the process's, and returns the last line.
func (o *output) last(ctx context.Context) string {
	select {
	case <-o.done:
		return o.text
	case <-ctx.Done():
		return ctx.Err().Error()
	}
}

func printable(line []byte) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, string(line)))
}
