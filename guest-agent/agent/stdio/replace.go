package stdio

import (
	"context"
	"errors"
	"fmt"
)

// ErrEnded says that the process has ended, and its streams with it.
var ErrEnded = errors.New("process already finished")

// Replace gives the process other streams, which it takes, also when it fails, and returns when they are in their places.
// The process stands still meanwhile. Either it goes on with all that has been on its way in the streams before, whose
// session must be over, or that is dropped. A stream that the process has no use for is closed.
func (p *Process) Replace(ctx context.Context, s Streams, goesOn bool) error {
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		s.Close()
		return ErrEnded
	}
	before := p.streams.In
	p.streams = s
	if p.stdin != nil {
		p.startFeed()
	} else if s.In != nil && s.In != s.Out {
		_ = s.In.Close()
	}
	// What feeds the process reads to the end what has come over a session that is over.
	if before != nil && !goesOn {
		_ = before.Close()
	}
	p.mu.Unlock()
	to := map[int]Stream{1: s.Out, 2: s.Err}
	next := map[int]*successor{}
	for _, o := range p.outputs {
		n := &successor{to: to[o.number], goesOn: goesOn, taken: make(chan struct{})}
		if n.to == nil {
			n.to = nowhere{}
		}
		delete(to, o.number)
		next[o.number] = n
		o.replace(n)
	}
	for _, unused := range to {
		if unused != nil {
			_ = unused.Close()
		}
	}
	for _, o := range p.outputs {
		n := next[o.number]
		select {
		case <-n.taken:
		case <-o.done:
			_ = n.to.Close() // again, if it has been taken: no harm
		case <-ctx.Done():
			s.Close()
			return fmt.Errorf("wait for output %d to be attached: %w", o.number, context.Cause(ctx))
		}
	}
	return nil
}
