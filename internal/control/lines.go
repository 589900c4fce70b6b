package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
)

// line is one of an answer that takes its time. The last one has Failed, or is the end.
type line struct {
	Value json.RawMessage `json:"value,omitempty"`
	End   bool            `json:"end,omitempty"`
	// Failed is why it has come to nothing, and Status the error's class as a status of HTTP.
	Failed string `json:"failed,omitempty"`
	Status int    `json:"status,omitempty"`
}

// Lines is an answer that tells how far a request is: see Follow. Its methods may be called from many goroutines.
type Lines struct {
	w     http.ResponseWriter
	mu    sync.Mutex
	begun bool
}

// NewLines makes one. Nothing is written before something is told.
func NewLines(w http.ResponseWriter) *Lines { return &Lines{w: w} }

// Tell tells a value.
func (l *Lines) Tell(v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Errorf("encode an answer: %w", err)) // it is made of our own types
	}
	l.write(line{Value: b})
}

// End tells the last value, or why it has come to nothing. If that is all there is to tell, it is the answer's status, too.
func (l *Lines) End(v any, err error) {
	l.mu.Lock()
	begun := l.begun
	l.mu.Unlock()
	switch {
	case err != nil && !begun:
		Answer(l.w, nil, err)
	case err != nil:
		l.write(line{Failed: err.Error(), Status: status(err)})
	default:
		l.Tell(v)
		l.write(line{End: true})
	}
}

func (l *Lines) write(one line) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.begun {
		l.w.Header().Set("Content-Type", "application/x-ndjson")
		l.begun = true
	}
	if json.NewEncoder(l.w).Encode(one) == nil { // otherwise the client has gone away
		_ = http.NewResponseController(l.w).Flush()
	}
}

// follow reads such an answer.
func follow(answer io.Reader, each func(json.RawMessage) error) error {
	for d := json.NewDecoder(answer); ; {
		var l line
		err := d.Decode(&l)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return errdefs.ErrUnavailable.WithMessage("the daemon has ended before it was done: see its log")
		case err != nil:
			return fmt.Errorf("read the daemon's answer: %w", err)
		case l.Failed != "":
			return &failure{l.Failed, errhttp.ToNative(l.Status)}
		case l.End:
			return nil
		}
		if err := each(l.Value); err != nil {
			return err
		}
	}
}
