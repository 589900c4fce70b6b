package batch

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// room is where items wait that were refused for want of room. One of them at a time tries again: when there may be some, as one of
// the batch's sandboxes is gone or another one that waited has found some, or when the time has passed that its refusal names.
type room struct {
	turn  chan struct{} // whose token is in there is the one
	maybe chan struct{} // a token for each reason to try
}

func newRoom(n int) room { return room{make(chan struct{}, 1), make(chan struct{}, n)} }

// freed says that there may be room.
func (r room) freed() {
	select {
	case r.maybe <- struct{}{}:
	default: // there are reasons enough
	}
}

// wait returns when it is worth another try, or ctx has ended.
func (r room) wait(ctx context.Context, after time.Duration) {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-r.turn }()
	t := time.NewTimer(after)
	defer t.Stop()
	select {
	case <-r.maybe:
	case <-t.C:
	case <-ctx.Done():
	}
}

// mostTries is how often a sandbox is begun that can't be made for another reason than want of room, and that may pass.
const mostTries = 3

// noSandbox is why an item has none although it has waited for it.
type noSandbox struct {
	last error // the last refusal, nil if there was none
}

func (n *noSandbox) Error() string {
	const why = "the batch's deadline has passed before this item had a sandbox"
	if n.last == nil {
		return why
	}
	return fmt.Sprintf("%s; the last refusal: %v", why, n.last)
}

func (n *noSandbox) Unwrap() error { return context.DeadlineExceeded }

// sandbox makes an item's, when there is room for it.
func (b *Batch) sandbox(ctx context.Context, r *Result) (lifecycle.Sandbox, error) {
	c := b.create(r.Index)
	var last error
	for failed := 0; ctx.Err() == nil; {
		began := time.Now()
		b.count(0, 1)
		sb, err := b.Sandboxes.Create(ctx, c)
		if err == nil {
			r.Waited, r.Made = began.Sub(b.began), time.Since(began)
			if last != nil {
				b.room.freed() // maybe for another one, too
			}
			return sb, nil
		}
		b.count(0, -1)
		r.Waited = time.Since(b.began)
		if ctx.Err() != nil {
			break
		}
		if !lifecycle.NoRoom(err) {
			failed++
		}
		if lifecycle.RetryAfter(err) == 0 || failed == mostTries {
			return sb, err
		}
		last = err
		b.room.wait(ctx, lifecycle.RetryAfter(err))
	}
	r.Waited = time.Since(b.began)
	return lifecycle.Sandbox{}, &noSandbox{last}
}

// refusal tells whether an error is why no sandbox may be made, rather than why one couldn't.
func refusal(err error) bool {
	_, waited := err.(*noSandbox)
	return waited || lifecycle.NoRoom(err) || errdefs.IsInvalidArgument(err) || errdefs.IsNotFound(err) || errdefs.IsPermissionDenied(err) || errdefs.IsFailedPrecondition(err)
}
