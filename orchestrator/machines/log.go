package machines

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// levels in their order.
var levels = []lifecycle.Level{lifecycle.Debug, lifecycle.Info, lifecycle.Warn, lifecycle.Error}

// maxLine bounds a line that is shown; the rest of a longer one is left out.
const maxLine = 16 << 10

// Log reads what a machine has written: its envd lines of JSON, others anything.
func (m *Machines) Log(_ context.Context, id string, q lifecycle.LogQuery) ([]lifecycle.LogEntry, error) {
	path := sandbox.LogPath(m.cfg, id)
	var all []lifecycle.LogEntry
	for n := m.cfg.Logs.MaxFiles; n >= 0; n-- {
		name := path
		if n > 0 {
			name = fmt.Sprintf("%s.%d", path, n)
		}
		entries, err := readLog(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the log of sandbox %s: %w", id, err)
		}
		all = append(all, entries...)
	}
	return choose(all, q), nil
}

// FollowLog tells of what a machine has written, and writes.
func (m *Machines) FollowLog(ctx context.Context, id string, tail int, ended <-chan struct{}, each func(lifecycle.LogEntry) error) error {
	w := &lineWriter{each: each, at: time.Now()}
	err := sandbox.CopyLog(ctx, w, sandbox.LogPath(m.cfg, id), tail, ended)
	switch {
	case w.err != nil:
		return w.err
	case errors.Is(err, sandbox.ErrNoLog): // it has written nothing, or is gone with its log
		return nil
	case err != nil:
		return fmt.Errorf("read the log of sandbox %s: %w", id, err)
	}
	return w.end()
}

// lineWriter makes entries of lines.
type lineWriter struct {
	each func(lifecycle.LogEntry) error
	at   time.Time // of the entry before
	line []byte    // of which the end hasn't come
	err  error     // each's
}

// Write is of io.Writer.
func (w *lineWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		w.line = append(w.line, part[:min(len(part), maxLine-len(w.line))]...)
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
		w.at = e.At
		w.err = w.each(e)
	}
	w.line = w.line[:0]
	return w.err
}

// choose picks the entries that are asked for.
func choose(all []lifecycle.LogEntry, q lifecycle.LogQuery) []lifecycle.LogEntry {
	if q.Backward {
		slices.Reverse(all)
	}
	chosen := []lifecycle.LogEntry{}
	for _, e := range all {
		switch {
		case len(chosen) == q.Limit:
			return chosen
		case !q.From.IsZero() && (q.Backward && e.At.After(q.From) || !q.Backward && e.At.Before(q.From)):
		case q.Level != "" && slices.Index(levels, e.Level) < slices.Index(levels, q.Level):
		case q.Search != "" && !strings.Contains(e.Message, q.Search):
		default:
			chosen = append(chosen, e)
		}
	}
	return chosen
}

// readLog reads one file. A line without a time is of the time of the one before it.
func readLog(name string) ([]lifecycle.LogEntry, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var all []lifecycle.LogEntry
	at := st.ModTime()
	r := bufio.NewReaderSize(f, maxLine)
	for {
		line, err := r.ReadSlice('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			e := parse(bytes.TrimRight(line, "\r\n"), at)
			at = e.At
			all = append(all, e)
		}
		for errors.Is(err, bufio.ErrBufferFull) { // skip the rest
			_, err = r.ReadSlice('\n')
		}
		if err != nil {
			return all, nil // io.EOF; what can't be read any more is as what isn't there
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
	for k, v := range record {
		text, ok := v.(string)
		if !ok {
			b, _ := json.Marshal(v) // it comes from JSON
			text = string(b)
		}
		switch k {
		case "time":
			if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
				e.At = t
			}
		case "level":
			if l := lifecycle.Level(strings.ToLower(text)); slices.Contains(levels, l) {
				e.Level = l
			}
		case "msg":
			e.Message = text
		default:
			e.Fields[k] = text
		}
	}
	return e
}
