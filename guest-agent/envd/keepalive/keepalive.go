// Package keepalive says how long a stream may be silent before the proxies on its way take it for dead.
package keepalive

import (
	"net/http"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
)

// Header asks for an interval, in seconds.
const Header = "Keepalive-Ping-Interval"

const (
	standard = 90 * time.Second
	longest  = time.Hour
)

// Interval is what the client asks for. The error is errdefs.ErrInvalidArgument.
func Interval(h http.Header) (time.Duration, error) {
	v := h.Get(Header)
	if v == "" {
		return standard, nil
	}
	n, err := strconv.ParseUint(v, 10, 31)
	if err != nil || n == 0 {
		return 0, errdefs.ErrInvalidArgument.WithMessage(Header + " is no number of seconds above 0: " + strconv.Quote(v))
	}
	return min(time.Duration(n)*time.Second, longest), nil
}
