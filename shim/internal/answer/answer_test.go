package answer

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestMetricsOfAGuest(t *testing.T) {
	for name, b := range map[string][]byte{"too much": make([]byte, maxMetrics+1), "nonsense": {0xff, 0xff}} {
		if _, err := Metrics(b); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestError(t *testing.T) {
	for _, c := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), codes.DeadlineExceeded, "wait: context deadline exceeded"},
		{context.Canceled, codes.Canceled, "context canceled"},
		{errors.Join(errdefs.ErrNotFound.WithMessage("no box"), errors.New("undo: busy")), codes.NotFound, "no box; undo: busy"},
		{errors.New("a\r\nb"), codes.Unknown, "a; b"},
		{ForCreate(errdefs.ErrNotImplemented.WithMessage("no")), codes.FailedPrecondition, "no"},
	} {
		if s := status.Convert(Error(c.err)); s.Code() != c.code || s.Message() != c.text {
			t.Errorf("%v became %v", c.err, s)
		}
	}
}
