package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
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
	return busyError{error: errdefs.ErrUnavailable.WithMessage(message), after: after}
}

// internalError is one of the machine's or the guest's that is nothing to the user: that the machine is in no state for it, say,
// isn't the same as that of the sandbox.
type internalError struct{ error }

func (internalError) Unwrap() error { return errdefs.ErrInternal }

// ofMachine is an error of what was done with a machine, of a class that says nothing wrong of the sandbox, nor that its team has
// too much.
func ofMachine(err error) error {
	switch {
	case errdefs.IsResourceExhausted(err):
		return admission.Short(admission.ReasonMachine, 10*time.Second, "%v", err)
	case err == nil, errdefs.IsUnavailable(err), errdefs.IsInvalidArgument(err), errdefs.IsAborted(err), errors.Is(err, context.Canceled):
		return err
	case errdefs.IsDeadlineExceeded(err):
		// Whoever else is on the host may have left it no time.
		return unavailable(err.Error()+": this host is too busy for it, or what runs in the sandbox doesn't answer: try again", 5*time.Second)
	}
	return internalError{err}
}

// NoRoom tells whether what failed with that error was refused for want of room: this host has none, or the team has its share.
func NoRoom(err error) bool {
	var no *admission.Refusal
	return errors.As(err, &no) || errdefs.IsResourceExhausted(err)
}

// RetryAfter tells when what failed with that error is worth another try, at least a second; 0 if it says nothing of that.
func RetryAfter(err error) time.Duration {
	var busy busyError
	var no *admission.Refusal
	switch {
	case errors.As(err, &no):
		return max(no.After, time.Second)
	case errors.As(err, &busy):
		return max(busy.after, time.Second)
	case errdefs.IsUnavailable(err) || errdefs.IsResourceExhausted(err):
		return time.Second
	}
	return 0
}

// refused is the error of what isn't possible in the row's state.
func refused(r *row, ev event) error {
	say := func(format string, args ...any) error {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
	}
	switch {
	case r.State == Killing:
		return say("sandbox '%s' is being killed", r.ID)
	case r.State == Paused && ev == evPause:
		return say("sandbox '%s' is paused already", r.ID)
	case r.State == Running && ev == evResume:
		return say("sandbox '%s' is running already", r.ID)
	case r.State == Paused:
		return say("sandbox '%s' is paused: resume it first", r.ID)
	}
	return say("sandbox '%s' is in the state %s: try again when that is over", r.ID, r.State)
}
