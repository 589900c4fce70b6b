package builds

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Bounds of what is kept of what a build tells.
const (
	maxLines = 10000
	maxBytes = 512 << 10
	maxLine  = 4 << 10
)

// log is what a build tells while it goes on. Lines are written down as fast as the disk takes them, as many at once as there are
// then.
type log struct {
	s  *Service
	id string

	mu      sync.Mutex
	pending []db.LogLine
	lines   int
	bytes   int
	lost    int
	ended   bool
	idle    chan struct{} // closed when nobody writes
}

func newLog(s *Service, id string) *log {
	idle := make(chan struct{})
	close(idle)
	return &log{s: s, id: id, idle: idle}
}

// tell is a templates.Report. A message may have several lines.
func (l *log) tell(step string, lv lifecycle.Level, message string) {
	at := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	for line := range strings.Lines(message) {
		line = clean(line)
		if l.lines >= maxLines || l.bytes+len(line) > maxBytes {
			l.lost++
			continue
		}
		l.pending = append(l.pending, db.LogLine{Seq: l.lines, At: at, Level: level(lv), Step: step, Message: line})
		l.lines++
		l.bytes += len(line)
	}
	select {
	case <-l.idle:
		l.idle = make(chan struct{})
		go l.write(l.idle)
	default:
	}
}

// clean is a line as far as it is kept.
func clean(line string) string {
	line = strings.TrimRight(line, "\r\n")
	if len(line) > maxLine {
		line = line[:maxLine] + "…"
	}
	return strings.ReplaceAll(strings.ToValidUTF8(line, "\ufffd"), "\x00", "\ufffd")
}

// write writes down what is pending, until nothing is.
func (l *log) write(idle chan struct{}) {
	defer close(idle)
	for {
		lines := l.take()
		if lines == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), l.s.Timeout(writeTimeout))
		err := l.s.db.AddLog(ctx, l.id, lines)
		cancel()
		if err != nil {
			l.s.Log.Warn("lines of a build's log are lost", "build", l.id, "lines", len(lines), "error", err)
		}
		l.s.tell(l.id)
	}
}

// take takes what is pending, nil if nothing is, or if it is the end's.
func (l *log) take() []db.LogLine {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil
	}
	lines := l.pending
	l.pending = nil
	return lines
}

// end ends the log and returns what is still to be written, again and again. Nobody else writes then.
func (l *log) end() []db.LogLine {
	l.mu.Lock()
	l.ended = true
	idle := l.idle
	l.mu.Unlock()
	<-idle
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost > 0 {
		l.pending = append(l.pending, db.LogLine{Seq: l.lines, At: time.Now(), Level: level(lifecycle.Warn), Message: fmt.Sprintf("%d more lines were not kept: a build's log has at most %d lines and %d KiB", l.lost, maxLines, maxBytes>>10)})
		l.lost = 0
	}
	return l.pending
}
