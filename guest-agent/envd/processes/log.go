package processes

import (
	"bytes"
	"context"
	"log/slog"
	"time"
	"unicode/utf8"
)

// LogHeader, with any value, has the output of the command that a request starts be in envd's log, too, whoever is subscribed.
const LogHeader = "X-Cube-Log"

// What a command's output may take of the log: what there is more of is left out, and that it is, is said.
const (
	logLine  = 2 << 10  // bytes of an entry; a longer line is several
	logBurst = 1 << 20  // bytes at once
	logRate  = 64 << 10 // bytes a second
)

var streamNames = map[Stream]string{Stdout: "stdout", Stderr: "stderr", Terminal: "terminal"}

// outputLog writes what a command writes to a log, a line an entry.
type outputLog struct {
	to    *slog.Logger
	lines map[Stream][]byte // of which the ends haven't come
	left  int               // bytes that may be written now
	at    time.Time         // as of then
	out   int               // bytes that were left out since the last entry
}

// log writes the process's output until its end, and that. The log is named after the process's tag.
func (p *Process) log(sub *Subscription, to *slog.Logger) {
	defer sub.Leave()
	if p.Spec.Tag != nil {
		to = to.With("command", *p.Spec.Tag)
	}
	l := &outputLog{to: to, lines: map[Stream][]byte{}, left: logBurst, at: time.Now()}
	for {
		select {
		case o := <-sub.Output:
			l.write(o)
			continue
		case <-p.Done():
		}
		for len(sub.Output) > 0 {
			l.write(<-sub.Output)
		}
		l.end(p.End())
		return
	}
}

func (l *outputLog) write(o Output) {
	line := append(l.lines[o.Stream], o.Bytes...)
	for {
		i := bytes.IndexByte(line, '\n')
		switch {
		case i >= 0 && i <= logLine:
			l.entry(o.Stream, line[:i])
			line = line[i+1:]
		case len(line) > logLine:
			n := logLine
			for n > logLine-utf8.UTFMax && !utf8.RuneStart(line[n]) {
				n--
			}
			l.entry(o.Stream, line[:n])
			line = line[n:]
		default:
			l.lines[o.Stream] = append([]byte(nil), line...)
			return
		}
	}
}

func (l *outputLog) entry(s Stream, line []byte) {
	if line = bytes.TrimRight(line, "\r"); len(line) == 0 {
		return
	}
	now := time.Now()
	l.left = int(min(logBurst, float64(l.left)+now.Sub(l.at).Seconds()*logRate))
	l.at = now
	if len(line) > l.left {
		l.out += len(line)
		return
	}
	l.left -= len(line)
	l.gap()
	l.to.Info(string(line), "stream", streamNames[s])
}

// gap says what isn't there.
func (l *outputLog) gap() {
	if l.out > 0 {
		l.to.Warn("output was left out of the log: it came too fast", "bytes", l.out)
		l.out = 0
	}
}

func (l *outputLog) end(e End) {
	for s, line := range l.lines {
		l.entry(s, line)
	}
	l.gap()
	level := slog.LevelInfo
	if e.Err != "" {
		level = slog.LevelWarn
	}
	l.to.Log(context.Background(), level, "the command has ended", "how", e.Status)
}
