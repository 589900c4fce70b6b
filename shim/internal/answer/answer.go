// Package answer is how the shim's services answer containerd: the one place where errors become gRPC statuses, and
// where what a guest says of itself is checked.
package answer

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/containerd/v2/pkg/protobuf/proto"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
)

// maxMetrics bounds what a guest may send as metrics; real ones have some hundred bytes.
const maxMetrics = 64 << 10

// Error makes an error what containerd understands, in one line.
func Error(err error) error {
	text := oneLine(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		// A context's error has no status, and containerd would not know what it was.
		return status.Error(codes.DeadlineExceeded, text)
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, text)
	}
	return status.Error(status.Code(errgrpc.ToGRPC(err)), text)
}

// oneLine is an error in one line, without what errdefs adds to say its class.
func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// ForCreate keeps Create from answering NotImplemented: containerd would take it for a shim of an older protocol and try
// again with that.
func ForCreate(err error) error {
	if errdefs.IsNotImplemented(err) {
		return errdefs.ErrFailedPrecondition.WithMessage(err.Error())
	}
	return err
}

// NotImplemented refuses a call.
func NotImplemented(what string) error {
	return Error(errdefs.ErrNotImplemented.WithMessage(fmt.Sprintf("%s is not supported by this version", what)))
}

// Metrics checks what a guest says that it uses, and makes it containerd's.
func Metrics(b []byte) (*anypb.Any, error) {
	if len(b) > maxMetrics {
		return nil, fmt.Errorf("the guest sent %d bytes", len(b))
	}
	var m stats.Metrics
	if err := proto.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("the guest sent what are no cgroup metrics: %w", err)
	}
	return typeurl.MarshalAnyToProto(&m)
}
