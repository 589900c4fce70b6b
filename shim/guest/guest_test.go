package guest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
)

func same(d time.Duration) time.Duration { return d }

func TestTextIsSafeToShow(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                "plain",
		"two\nlines\r\n":       "two lines",
		"\x1b[31mred\x00":      "?[31mred?",
		"bad \xff utf8":        "bad � utf8",
		strings.Repeat("x", 5): "xxxxx",
	} {
		if got := Text(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
	if got := Text(strings.Repeat("x", 1<<20)); len(got) > maxText+10 {
		t.Errorf("%d bytes", len(got))
	}
}

func FuzzText(f *testing.F) {
	for _, seed := range []string{"plain", "two\nlines\r\n", "\x1b[31mred\x00", "\xff\xfe", "\u202eright to left", strings.Repeat("é", maxText)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := Text(s)
		if len(got) > 3*maxText+10 || !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q gives %q", s, got)
		}
	})
}

// call makes one call of which the guest's side is answer.
func call(ctx context.Context, scale func(time.Duration) time.Duration, answer ttrpc.Invoker) error {
	info := &ttrpc.UnaryClientInfo{FullMethod: "/cube.agent.v1.Agent/Stats"}
	return interceptor(scale, &control{abort: func(error) {}})(ctx, &ttrpc.Request{}, &ttrpc.Response{}, info, answer)
}

func TestErrorsOfTheGuest(t *testing.T) {
	for code, is := range map[codes.Code]func(error) bool{
		codes.InvalidArgument:    errdefs.IsInvalidArgument,
		codes.NotFound:           errdefs.IsNotFound,
		codes.AlreadyExists:      errdefs.IsAlreadyExists,
		codes.FailedPrecondition: errdefs.IsFailedPrecondition,
		codes.DeadlineExceeded:   func(err error) bool { return errors.Is(err, context.DeadlineExceeded) },
		// Nothing of these may reach containerd as such: it would draw conclusions about the shim.
		codes.Unimplemented: errdefs.IsUnknown,
		codes.Unavailable:   errdefs.IsUnknown,
		codes.Code(99):      errdefs.IsUnknown,
	} {
		err := call(t.Context(), same, func(_ context.Context, _ *ttrpc.Request, r *ttrpc.Response) error {
			r.Status = &spb.Status{Code: int32(code), Message: "a\nb"}
			return nil
		})
		if !is(err) || !strings.Contains(err.Error(), "a b") {
			t.Errorf("%s: %v", code, err)
		}
	}
}

func TestDeadline(t *testing.T) {
	err := call(t.Context(), func(time.Duration) time.Duration { return time.Millisecond }, func(ctx context.Context, _ *ttrpc.Request, _ *ttrpc.Response) error {
		<-ctx.Done()
		return ctx.Err()
	})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Stats") {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := call(ctx, same, func(ctx context.Context, _ *ttrpc.Request, _ *ttrpc.Response) error { return ctx.Err() }); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func TestGone(t *testing.T) {
	err := call(t.Context(), same, func(context.Context, *ttrpc.Request, *ttrpc.Response) error { return ttrpc.ErrClosed })
	if !errors.Is(err, ErrGone) || !errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
}
