package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// TestOfMachine: what a machine's errors are to a user of the sandbox.
func TestOfMachine(t *testing.T) {
	for _, c := range []struct {
		err   error
		is    func(error) bool
		again time.Duration
	}{
		{errdefs.ErrResourceExhausted, errdefs.IsUnavailable, 10 * time.Second},
		{fmt.Errorf("the agent didn't answer: %w", context.DeadlineExceeded), errdefs.IsUnavailable, 5 * time.Second},
		{&late{time.Minute}, errdefs.IsUnavailable, time.Second},
		{errdefs.ErrNotFound, errdefs.IsInternal, 0},
		{errors.New("odd"), errdefs.IsInternal, 0},
		{errdefs.ErrInvalidArgument, errdefs.IsInvalidArgument, 0},
		{context.Canceled, errdefs.IsCanceled, 0},
	} {
		got := ofMachine(c.err)
		if !c.is(got) || RetryAfter(got) != c.again {
			t.Errorf("%v is %v, to be tried again after %v", c.err, got, RetryAfter(got))
		}
	}
	if err := ofMachine(nil); err != nil {
		t.Error(err)
	}
}
