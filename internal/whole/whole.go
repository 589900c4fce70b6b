// Package whole gets whole lists from the kernel, which gives long ones piece by piece, and tells of it when they change
// meanwhile.
package whole

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// Attempts bounds how often a list is asked for that changes while the kernel gives it.
const Attempts = 10

// List returns a list that was as it is at one time, unless it changes all the time.
func List[T any](get func() ([]T, error)) (all []T, err error) {
	for range Attempts {
		if all, err = get(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
