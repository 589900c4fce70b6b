package machines

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// levels in their order.
var levels = []lifecycle.Level{lifecycle.Debug, lifecycle.Info, lifecycle.Warn, lifecycle.Error}

// Limits of what the guest's lines may take here.
const (
	maxLine   = 16 << 10 // the rest of a line is left out
	maxFields = 64       // of a line
	maxPage   = 4 << 20  // of an answer, which has fewer entries than are asked for then
)

// Log reads what a machine has written: its envd lines of JSON, others anything. No more is kept than is answered.
func (m *Machines) Log(ctx context.Context, id string, q lifecycle.LogQuery) ([]lifecycle.LogEntry, error) {
	path := sandbox.LogPath(m.cfg, id)
	c := &choice{LogQuery: q, chosen: []lifecycle.LogEntry{}}
	for n := m.cfg.Logs.MaxFiles; n >= 0; n-- {
		name := path
		if n > 0 {
			name = fmt.Sprintf("%s.%d", path, n)
		}
		err := readLog(ctx, name, c.add)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read the log of sandbox %s: %w", id, err)
		}
	}
	return c.entries(), nil
}

// FollowLog tells of what a machine has written, and writes.
func (m *Machines) FollowLog(ctx context.Context, id string, from lifecycle.LogStart, ended <-chan struct{}, each func(lifecycle.LogEntry) error) (err error) {
	w := &lineWriter{each: each, at: time.Now()}
	start := sandbox.LogStart{Tail: from.Tail}
	if from.After != "" {
		if start.After, err = sandbox.ParseLogPlace(from.After); err != nil {
			return err
		}
	}
	err = sandbox.CopyLog(ctx, w, sandbox.LogPath(m.cfg, id), start, ended)
	switch {
	case w.err != nil:
		return w.err
	case errors.Is(err, sandbox.ErrNoLog): // it has written nothing, or is gone with its log
		return nil
	case err != nil:
		return fmt.Errorf("read the log of sandbox %s: %w", id, err)
	case ctx.Err() != nil: // the rest of the last line may come yet, for whoever goes on after the one before
		return nil
	}
	return w.end()
}

// lineWriter makes entries of lines.
type lineWriter struct {
	each  func(lifecycle.LogEntry) error
	at    time.Time        // of the entry before
	line  []byte           // of which the end hasn't come
	place sandbox.LogPlace // behind it
	err   error            // each's
}

// Place is of sandbox.Placed.
func (w *lineWriter) Place(p sandbox.LogPlace) { w.place = p }

// Write is of io.Writer.
func (w *lineWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		w.line = append(w.line, part[:min(len(part), maxLine-len(w.line))]...)
		w.place = w.place.Add(len(rest) - len(after))
		rest = after
		if !whole {
			break
		}
		if err := w.end(); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// end is the end of a line.
func (w *lineWriter) end() error {
	if line := bytes.TrimRight(w.line, "\r"); len(bytes.TrimSpace(line)) > 0 {
		e := parse(line, w.at)
		w.at, e.Place = e.At, w.place.String()
		w.err = w.each(e)
	}
	w.line = w.line[:0]
	return w.err
}

// choice picks the entries that are asked for, of all from the oldest on.
type choice struct {
	lifecycle.LogQuery
	chosen []lifecycle.LogEntry
	size   int // in bytes
}

// add takes an entry, and says whether more are wanted.
func (c *choice) add(e lifecycle.LogEntry) bool {
	switch {
	case !c.From.IsZero() && (c.Backward && e.At.After(c.From) || !c.Backward && e.At.Before(c.From)):
		return true
	case c.Level != "" && slices.Index(levels, e.Level) < slices.Index(levels, c.Level):
		return true
	case c.Search != "" && !strings.Contains(e.Message, c.Search):
		return true
	case !c.Backward && c.full():
		return false
	}
	c.chosen, c.size = append(c.chosen, e), c.size+size(e)
	for c.Backward && len(c.chosen) > 1 && (len(c.chosen) > c.Limit || c.size > maxPage) {
		c.chosen, c.size = c.chosen[1:], c.size-size(c.chosen[0])
	}
	return c.Backward || !c.full()
}

func (c *choice) full() bool { return len(c.chosen) >= c.Limit || c.size >= maxPage }

// size is how much an entry takes, about.
func size(e lifecycle.LogEntry) int {
	n := 100 + len(e.Message)
	for k, v := range e.Fields {
		n += 100 + len(k) + len(v)
	}
	return n
}

// entries are those that were chosen, in the order that was asked for.
func (c *choice) entries() []lifecycle.LogEntry {
	if c.Backward {
		slices.Reverse(c.chosen)
	}
	return c.chosen
}

// readLog calls each with the lines of one file until it returns false. A line without a time is of the time of the one before it.
func readLog(ctx context.Context, name string, each func(lifecycle.LogEntry) bool) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	at := st.ModTime()
	r := bufio.NewReaderSize(f, maxLine)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		line, err := r.ReadSlice('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			e := parse(bytes.TrimRight(line, "\r\n"), at)
			at = e.At
			if !each(e) {
				return nil
			}
		}
		for errors.Is(err, bufio.ErrBufferFull) { // skip the rest
			_, err = r.ReadSlice('\n')
		}
		if err != nil {
			return nil // io.EOF; what can't be read any more is as what isn't there
		}
	}
}

// parse reads a line, which the guest may have made up.
func parse(line []byte, at time.Time) lifecycle.LogEntry {
	var record map[string]any
	if line[0] != '{' || json.Unmarshal(line, &record) != nil {
		return lifecycle.LogEntry{At: at, Message: strings.ToValidUTF8(string(line), "\uFFFD"), Level: lifecycle.Info}
	}
	e := lifecycle.LogEntry{At: at, Level: lifecycle.Info, Fields: map[string]string{}}
	for _, k := range slices.Sorted(maps.Keys(record)) {
		text, ok := record[k].(string)
		if !ok {
			b, _ := json.Marshal(record[k]) // it comes from JSON
			text = string(b)
		}
		switch k {
		case "time":
			// JSON has no other years.
			if t, err := time.Parse(time.RFC3339Nano, text); err == nil && t.UTC().Year() >= 1 && t.UTC().Year() <= 9999 {
				e.At = t
			}
		case "level":
			if l := lifecycle.Level(strings.ToLower(text)); slices.Contains(levels, l) {
				e.Level = l
			}
		case "msg":
			e.Message = text
		default:
			if len(e.Fields) < maxFields {
				e.Fields[k] = text
			}
		}
	}
	return e
}
