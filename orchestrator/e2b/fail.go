package e2b

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// failure is an error that has a status of its own, rather than that of its class.
type failure struct {
	status int
	line   string
}

func (f *failure) Error() string { return f.line }

func fail(status int, format string, args ...any) error {
	return &failure{status, fmt.Sprintf(format, args...)}
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

// errorBody is E2B's body of an error. SDKs go by the code in it, not by the status.
type errorBody struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// explain is what a client is told of an error, and after which time it may try again, 0 if that isn't said. What is wrong
// with this machine is in its log, under the request's id.
func explain(err error, request string) (body errorBody, again time.Duration) {
	again = lifecycle.RetryAfter(err)
	status := http.StatusInternalServerError
	var own *failure
	switch {
	case errors.As(err, &own):
		status = own.status
	case errdefs.IsInvalidArgument(err), errdefs.IsOutOfRange(err):
		status = http.StatusBadRequest
	case errdefs.IsUnauthorized(err):
		status = http.StatusUnauthorized
	case errdefs.IsPermissionDenied(err):
		status = http.StatusForbidden
	case errdefs.IsNotFound(err):
		status = http.StatusNotFound
	case errdefs.IsFailedPrecondition(err), errdefs.IsAlreadyExists(err), errdefs.IsConflict(err), errdefs.IsAborted(err):
		status = http.StatusConflict
	case errdefs.IsResourceExhausted(err):
		status = http.StatusTooManyRequests
	case errdefs.IsUnavailable(err):
		status = http.StatusServiceUnavailable
	case errdefs.IsNotImplemented(err):
		status = http.StatusNotImplemented
	case errdefs.IsDeadlineExceeded(err), errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
	case errdefs.IsCanceled(err), errors.Is(err, context.Canceled):
		// The daemon ends, or nobody reads this.
		return errorBody{http.StatusServiceUnavailable, "cube is being stopped"}, time.Second
	}
	if status == http.StatusInternalServerError {
		return errorBody{status, "internal error: the log of cube up has it under request " + request}, 0
	}
	return errorBody{status, err.Error()}, again
}

// seconds is a time for a header, which takes whole seconds.
func seconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}
