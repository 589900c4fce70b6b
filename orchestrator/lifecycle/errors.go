package lifecycle

import (
	"errors"
	"time"

	"github.com/containerd/errdefs"
)

// Errors have a class of errdefs: NotFound, InvalidArgument, PermissionDenied, ResourceExhausted, Unavailable, and
// FailedPrecondition or AlreadyExists where the sandbox is in no state for what is asked. Their text is for the user.

// busyError is Unavailable or ResourceExhausted, for so long.
type busyError struct {
	error
	after time.Duration
}

func (e busyError) Unwrap() error { return e.error }

// unavailable is errdefs.ErrUnavailable that may have passed after that time.
func unavailable(message string, after time.Duration) error {
	return busyError{errdefs.ErrUnavailable.WithMessage(message), after}
}

// RetryAfter tells when what failed with that error is worth another try, at least a second; 0 if it says nothing of that.
func RetryAfter(err error) time.Duration {
	var busy busyError
	switch {
	case errors.As(err, &busy):
		return max(busy.after, time.Second)
	case errdefs.IsUnavailable(err) || errdefs.IsResourceExhausted(err):
		return time.Second
	}
	return 0
}
