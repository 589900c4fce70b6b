package processes

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
)

// record is a line of a log.
type record struct {
	Level, Msg, Command, Stream, How string
	Bytes                            int
}

// records are what a log has.
type records struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (r *records) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.Write(b)
}

// until returns what there is when the command has ended.
func (r *records) until(t *testing.T) (all []record) {
	t.Helper()
	for deadline := time.Now().Add(waitTime); ; time.Sleep(10 * time.Millisecond) {
		all = nil
		r.mu.Lock()
		text := r.b.String()
		r.mu.Unlock()
		for line := range strings.Lines(text) {
			var one record
			must(t, json.Unmarshal([]byte(line), &one))
			all = append(all, one)
		}
		if len(all) > 0 && all[len(all)-1].Msg == "the command has ended" {
			return all[:len(all)-1]
		}
		if time.Now().After(deadline) {
			t.Fatalf("it hasn't ended:\n%.2000s", text)
		}
	}
}

// TestLog: what a command writes that is to be logged is, from its first byte to its last, when nobody listens, too.
func TestLog(t *testing.T) {
	c, r := newClient(t)
	log := &records{}
	r.Log = slog.New(slog.NewJSONHandler(log, nil))
	silent, _ := start(t, t.Context(), c, shell("echo nothing of this"))
	rest(t, silent)
	tag := "start"
	req := connect.NewRequest(shell(`printf 'one\r\n\ntwo\n'; echo problem >&2; printf '%02100d\n' 7; printf '\351\n'; sleep .1; printf tail; exit 3`))
	req.Msg.Tag = &tag
	req.Header().Set(LogHeader, "true")
	s, err := c.Start(t.Context(), req)
	must(t, err)
	s.Receive()
	s.Close() // nobody listens
	want := map[string][]string{"stdout": {"one", "two", strings.Repeat("0", logLine), strings.Repeat("0", 2100-1-logLine) + "7", "\uFFFD", "tail"}, "stderr": {"problem"}}
	got := map[string][]string{}
	for _, one := range log.until(t) {
		if one.Command != "start" || one.Level != "INFO" {
			t.Errorf("%+v", one)
		}
		got[one.Stream] = append(got[one.Stream], one.Msg)
	}
	for stream, lines := range want {
		if strings.Join(got[stream], "\n") != strings.Join(lines, "\n") {
			t.Errorf("%s is %q, not %q", stream, got[stream], lines)
		}
	}
	if !strings.Contains(log.b.String(), `"level":"WARN","msg":"the command has ended","command":"start","how":"exit status 3"`) {
		t.Errorf("how it ended isn't there:\n%s", log.b.String())
	}
}

// TestLogFlood: a command that writes and writes isn't held up, and fills no more of the log than it may, which says so.
func TestLogFlood(t *testing.T) {
	c, r := newClient(t)
	log := &records{}
	r.Log = slog.New(slog.NewJSONHandler(log, nil))
	const written = 4 << 20
	req := connect.NewRequest(shell(`yes 0123456789012345678901234567890123456789012345678901234567890 | head -c 4194304; echo; sleep 1; echo last`))
	req.Header().Set(LogHeader, "true")
	began := time.Now()
	s, err := c.Start(t.Context(), req)
	must(t, err)
	rest(t, s)
	logged, out := 0, 0
	all := log.until(t)
	for _, one := range all {
		if out += one.Bytes; one.Bytes == 0 {
			logged += len(one.Msg) + 1
		}
	}
	most := logBurst + int(time.Since(began).Seconds()*logRate)
	if logged > 2*most || out == 0 || all[len(all)-1].Msg != "last" {
		t.Errorf("%d bytes of %d are in the log, %d left out; the last entry is %+v", logged, written, out, all[len(all)-1])
	}
}
