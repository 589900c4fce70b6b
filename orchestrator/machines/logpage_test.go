package machines

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// logs makes machines with the log of one, "box", of files from the newest on.
func logs(t *testing.T, files ...string) *Machines {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	m := &Machines{cfg: cfg}
	path := sandbox.LogPath(cfg, "box")
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	for n, content := range files {
		name := path
		if n > 0 {
			name = fmt.Sprintf("%s.%d", path, n)
		}
		err = errors.Join(err, os.WriteFile(name, []byte(content), 0o600), os.Chtimes(name, noon, noon))
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// read reads the messages.
func read(t *testing.T, m *Machines, q lifecycle.LogQuery) string {
	t.Helper()
	if q.Limit == 0 {
		q.Limit = 100
	}
	all, err := m.Log(t.Context(), "box", q)
	if err != nil {
		t.Fatal(err)
	}
	var messages []string
	for _, e := range all {
		messages = append(messages, e.Message)
	}
	return strings.Join(messages, " ")
}

func TestLog(t *testing.T) {
	line := func(second int, level, message string) string {
		return fmt.Sprintf(`{"time":%q,"level":%q,"msg":%q}`+"\n", noon.Add(time.Duration(second)*time.Second).Format(time.RFC3339Nano), level, message)
	}
	m := logs(t, line(3, "INFO", "c")+"plain\n\n"+line(5, "ERROR", "e"), line(1, "DEBUG", "a")+line(2, "WARN", "b"))
	at := func(second int) time.Time { return noon.Add(time.Duration(second) * time.Second) }
	for _, c := range []struct {
		q    lifecycle.LogQuery
		want string
	}{
		{lifecycle.LogQuery{}, "a b c plain e"}, {lifecycle.LogQuery{Backward: true}, "e plain c b a"},
		{lifecycle.LogQuery{Limit: 2}, "a b"}, {lifecycle.LogQuery{Backward: true, Limit: 2}, "e plain"},
		{lifecycle.LogQuery{From: at(2)}, "b c plain e"}, {lifecycle.LogQuery{From: at(3), Backward: true, Limit: 3}, "plain c b"},
		{lifecycle.LogQuery{Level: lifecycle.Warn}, "b e"}, {lifecycle.LogQuery{Search: "la"}, "plain"},
	} {
		if got := read(t, m, c.q); got != c.want {
			t.Errorf("%+v: %q, want %q", c.q, got, c.want)
		}
	}
	if got, err := m.Log(t.Context(), "other", lifecycle.LogQuery{Limit: 1}); err != nil || got == nil || len(got) != 0 {
		t.Errorf("of a machine that has written nothing: %v, %v", got, err)
	}
}

// A guest that writes as much as it can isn't kept in memory.
func TestLogIsBounded(t *testing.T) {
	long := strings.Repeat("x", maxLine)
	m := logs(t, strings.Repeat(long+"yyy\n", 2*maxPage/maxLine)+"last\n")
	for _, backward := range []bool{false, true} {
		all, err := m.Log(t.Context(), "box", lifecycle.LogQuery{Limit: 10_000, Backward: backward})
		if err != nil || len(all) < 100 || len(all) > maxPage/maxLine+1 || all[1].Message != long {
			t.Errorf("backward %v: %d entries, %v", backward, len(all), err)
		}
		if backward && all[0].Message != "last" {
			t.Errorf("the newest is %.20q", all[0].Message)
		}
	}
	fields := "{"
	for n := range 1000 {
		fields += fmt.Sprintf(`"k%d":1,`, n)
	}
	if e := parse([]byte(fields+`"msg":"m"}`), noon); len(e.Fields) != maxFields || e.Message != "m" {
		t.Errorf("%d fields, message %q", len(e.Fields), e.Message)
	}
}

// FuzzLog: whatever a guest writes, an answer can be made of it.
func FuzzLog(f *testing.F) {
	f.Add([]byte(`{"time":"9999-12-31T23:59:59-23:59","level":"WARN","msg":"m","n":1e400,"deep":[{}]}`))
	f.Add([]byte(`{"time":"0000-01-01T00:00:00+23:59","level":7,"msg":null}`))
	f.Add([]byte("{\xff"))
	f.Fuzz(func(t *testing.T, line []byte) {
		if len(line) == 0 {
			return
		}
		e := parse(line, noon)
		if _, err := json.Marshal(e.At.UTC()); err != nil {
			t.Error(err)
		}
		if !utf8.ValidString(e.Message) || len(e.Fields) > maxFields || e.Level == "" {
			t.Errorf("%+v", e)
		}
	})
}
