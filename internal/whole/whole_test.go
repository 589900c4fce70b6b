package whole

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestList(t *testing.T) {
	other := errors.New("other")
	for _, tc := range []struct {
		interrupted int
		err         error
		want        error
		calls       int
	}{
		{0, nil, nil, 1},
		{Attempts - 1, nil, nil, Attempts},
		{Attempts, nil, netlink.ErrDumpInterrupted, Attempts},
		{1, other, other, 2},
	} {
		calls := 0
		_, err := List(func() ([]int, error) {
			if calls++; calls <= tc.interrupted {
				return nil, fmt.Errorf("some of it: %w", netlink.ErrDumpInterrupted)
			}
			return nil, tc.err
		})
		if !errors.Is(err, tc.want) || calls != tc.calls {
			t.Errorf("%+v: %v after %d calls", tc, err, calls)
		}
	}
}
