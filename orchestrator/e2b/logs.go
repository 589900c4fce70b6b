package e2b

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"
	"unicode/utf8"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// How many entries of a log a request may ask for, and how many it gets if it doesn't say.
const (
	logsDefault = 1000
	logsMostV1  = 10000
	logsMostV2  = 1000
	searchMost  = 256 // characters
)

type entryBody struct {
	Timestamp time.Time         `json:"timestamp"`
	Message   string            `json:"message"`
	Level     lifecycle.Level   `json:"level"`
	Fields    map[string]string `json:"fields"`
}

func entry(e lifecycle.LogEntry) entryBody {
	fields := e.Fields
	if fields == nil {
		fields = map[string]string{}
	}
	return entryBody{e.At.UTC(), e.Message, e.Level, fields}
}

// lineBody is an entry as a line of JSON, as E2B's command line reads it.
type lineBody struct {
	Timestamp time.Time `json:"timestamp"`
	Line      string    `json:"line"`
}

func line(e lifecycle.LogEntry) lineBody {
	l := maps.Clone(e.Fields)
	if l == nil {
		l = map[string]string{}
	}
	l["level"], l["message"] = string(e.Level), e.Message
	if l["logger"] == "" {
		l["logger"] = "cube"
	}
	b, err := json.Marshal(l)
	if err != nil {
		panic(fmt.Errorf("encode an entry of a log: %w", err)) // it is made of strings
	}
	return lineBody{e.At.UTC(), string(b)}
}

// logsV1 are the oldest from a moment on, each as it is and as a line of JSON.
func (s *Server) logsV1(c *call, id string) (answer, error) {
	q := lifecycle.LogQuery{From: c.query.milliseconds("start"), Limit: int(c.query.number("limit", logsDefault, 0, logsMostV1))}
	all, err := s.logs(c, id, q)
	if err != nil {
		return answer{}, err
	}
	lines, entries := make([]lineBody, 0, len(all)), make([]entryBody, 0, len(all))
	for _, e := range all {
		lines, entries = append(lines, line(e)), append(entries, entry(e))
	}
	return ok(map[string]any{"logs": lines, "logEntries": entries}), nil
}

func (s *Server) logsV2(c *call, id string) (answer, error) {
	q := lifecycle.LogQuery{
		From:     c.query.milliseconds("cursor"),
		Backward: c.query.choice("direction", "forward", "backward") == "backward",
		Limit:    int(c.query.number("limit", logsDefault, 0, logsMostV2)),
		Level:    lifecycle.Level(c.query.choice("level", "", "debug", "info", "warn", "error")),
		Search:   c.query.text("search"),
	}
	if n := utf8.RuneCountInString(q.Search); n > searchMost {
		c.query.fail("search", "it has %d characters, there can be %d", n, searchMost)
	}
	all, err := s.logs(c, id, q)
	if err != nil {
		return answer{}, err
	}
	entries := make([]entryBody, 0, len(all))
	for _, e := range all {
		entries = append(entries, entry(e))
	}
	return ok(map[string]any{"logs": entries}), nil
}

func (s *Server) logs(c *call, id string, q lifecycle.LogQuery) ([]lifecycle.LogEntry, error) {
	if err := c.checked(); err != nil {
		return nil, err
	}
	if q.Limit == 0 { // is the sandbox there?
		_, err := s.engine.Get(c.ctx, c.team, id)
		return nil, err
	}
	return s.engine.Logs(c.ctx, c.team, id, q)
}
