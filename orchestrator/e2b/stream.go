package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// pingEvery is how long a stream may be silent, for the proxies on its way, and how long a revoked key may go on.
	pingEvery = 15 * time.Second
	// maxStreams is how many a team may have at once.
	maxStreams = 64
)

// output is an answer that is sent bit by bit. It begins with the first of them, until which it can be refused.
type output struct {
	s    *Server
	x    *exchange
	kind string // its Content-Type
	mu   sync.Mutex
}

// teller is a form that such an answer has.
type teller interface {
	// ping says that there is nothing to say.
	ping() error
	// fail says why there is nothing more to come.
	fail(errorBody) error
}

// write sends what is whole. A client that doesn't take it in time is given up.
func (o *output) write(text string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	rc := http.NewResponseController(o.x)
	_ = rc.SetWriteDeadline(time.Now().Add(o.s.timeout(answerTimeout))) // there is none where it isn't known
	if o.x.status == 0 {
		o.x.streams = time.Now()
		o.s.counters.pending.Dec()
		h := o.x.Header()
		h.Set("Content-Type", o.kind)
		h.Set("Cache-Control", "no-store")
		o.x.WriteHeader(http.StatusOK)
	}
	if _, err := o.x.Write([]byte(text)); err != nil {
		return err
	}
	return rc.Flush()
}

// oneLine is JSON of our own types, and a newline.
func oneLine(v any) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Errorf("encode a part of an answer: %w", err))
	}
	return b.String()
}

// stream makes a handler of what tells something bit by bit. It ends with the server, the client or the key.
func stream[T teller](s *Server, by func(*output) T, f func(*call, T) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		c, err := s.receive(x, r)
		if err == nil {
			err = s.beginStream(c.team)
		}
		if err != nil {
			s.refuse(x, r, err)
			return
		}
		defer s.endStream(c.team)
		ctx, cancel := context.WithCancelCause(c.ctx)
		c.ctx = ctx
		to := by(&output{s: s, x: x})
		var beside sync.WaitGroup
		beside.Go(func() { cancel(s.attend(ctx, c, to)) })
		err = f(c, to)
		cancel(nil)
		beside.Wait()
		switch {
		case err == nil || r.Context().Err() != nil:
		case x.streams.IsZero():
			s.refuse(x, r, err)
		default:
			body, _ := explain(err, x.id)
			if body.Code >= http.StatusInternalServerError {
				x.cause = err
			}
			_ = to.fail(body) // the client may be what has failed
		}
	})
}

// beginStream counts a team's streams.
func (s *Server) beginStream(team string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streaming[team] >= maxStreams {
		return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("the team has %d streams open, which is the most it may have", maxStreams))
	}
	s.streaming[team]++
	return nil
}

func (s *Server) endStream(team string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streaming[team]--; s.streaming[team] == 0 {
		delete(s.streaming, team)
	}
}

var errStopping = errdefs.ErrUnavailable.WithMessage("cube is being stopped")

// attend keeps a stream from being silent, and tells why it has to end before ctx does.
func (s *Server) attend(ctx context.Context, c *call, to teller) error {
	tick := time.NewTicker(s.timeout(pingEvery))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.stopping:
			return errStopping
		case <-tick.C:
		}
		if _, _, err := s.keys.Authenticate(ctx, c.key); errdefs.IsUnauthorized(err) {
			return unauthorized(err)
		}
		if err := to.ping(); err != nil {
			return err
		}
	}
}
