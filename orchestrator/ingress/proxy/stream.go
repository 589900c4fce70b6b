package proxy

import (
	"context"
	"net/http"
	"net/http/httptrace"
	"sync"
	"time"
)

// lastWords is how long a client may take for the rest of what it was being told when its request was cut before an answer had
// begun.
const lastWords = 2 * time.Second

// stream is a request on its way, with all that comes after it: a response that goes on, an upgraded connection. It is the
// response's writer, too, so that cutting it reaches a client that takes nothing any more.
type stream struct {
	http.ResponseWriter
	rc     *http.ResponseController
	cancel context.CancelCauseFunc
	life   *life // that it is part of; nil before
	status int
	bytes  int64
	empty  bool // there is nothing but a header to come; set before that is written

	mu    sync.Mutex
	begun bool // the client has got a status
	isCut bool
	over  bool // the writer is the server's again
	try   attempt
}

// attempt is one of a request to get an answer.
type attempt struct {
	end context.CancelCauseFunc
	// wakes: the sandbox would be woken for another one. reads: the request changes nothing, so that it may be made twice.
	wakes, reads bool
	reached      bool // something of it may have got to the sandbox
	lost         bool // the sandbox's life has ended, and the request can begin anew
}

// begins has the request make an attempt, and returns its context.
func (s *stream) begins(ctx context.Context, wakes, reads bool) context.Context {
	ctx, end := context.WithCancelCause(ctx)
	s.mu.Lock()
	s.try = attempt{end: end, wakes: wakes, reads: reads}
	s.mu.Unlock()
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.try.reached = true
	}})
}

// lost says whether the attempt has come to nothing, and the request can begin anew.
func (s *stream) lost() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.try.lost
}

// leave has the stream be part of no life, so that it can join another.
func (s *stream) leave() {
	s.mu.Lock()
	if s.try.end != nil {
		s.try.end(nil)
	}
	s.try = attempt{}
	s.mu.Unlock()
	s.life.leave(s)
	s.life = nil
}

func newStream(w http.ResponseWriter, r *http.Request) (*stream, *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	return &stream{ResponseWriter: w, rc: http.NewResponseController(w), cancel: cancel}, r.WithContext(ctx)
}

// Unwrap has http.ResponseController find what the server's writer can.
func (s *stream) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// WriteHeader is of http.ResponseWriter.
func (s *stream) WriteHeader(status int) {
	if status >= 200 {
		s.begin(status)
	}
	s.ResponseWriter.WriteHeader(status)
}

// begin notes that the client gets a status.
func (s *stream) begin(status int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun, s.status = true, status
	if s.try.lost { // an answer was faster, of which there is no more than what is here
		s.cutLocked()
	}
	if s.isCut {
		_ = s.rc.SetWriteDeadline(time.Now().Add(lastWords))
	}
}

// Write is of http.ResponseWriter.
func (s *stream) Write(b []byte) (int, error) {
	if !s.begun { // only the handler's goroutine sets it
		s.WriteHeader(http.StatusOK)
	}
	n, err := s.ResponseWriter.Write(b)
	s.bytes += int64(n)
	return n, err
}

// FlushError is what http.ResponseController looks for. The header of an answer without a body is not sent before the answer's
// end: in HTTP/2 it has to be the same frame that ends the stream where gRPC has its status in it.
func (s *stream) FlushError() error {
	if s.empty {
		return nil
	}
	return s.rc.Flush()
}

// cut ends the stream from another goroutine. One that hasn't begun to answer is told why; any other breaks off, so that nobody
// takes it for complete. One that the sandbox would be woken for, and that may not have been there, or would do no harm twice, only
// loses its attempt.
func (s *stream) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over || s.isCut {
		return
	}
	if s.try.wakes && !s.begun && (!s.try.reached || s.try.reads) {
		s.try.lost = true
		s.try.end(errOver)
		return
	}
	s.cutLocked()
}

func (s *stream) cutLocked() {
	s.isCut = true
	s.cancel(errOver)
	// The handler waits for the client no longer, neither for the rest of a body nor for room. A writer that has no deadlines
	// has no client that could keep it waiting.
	_ = s.rc.SetReadDeadline(time.Now())
	if s.begun {
		_ = s.rc.SetWriteDeadline(time.Now())
	}
	cutStreams.Inc()
}

// wasCut says whether the stream was cut, which leaves its deadlines on the client's connection.
func (s *stream) wasCut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isCut
}

// finish gives the writer back to the server: nothing cuts it any more.
func (s *stream) finish() {
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.cancel(nil)
	if s.life != nil {
		s.life.leave(s)
	}
}
