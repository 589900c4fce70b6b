package envd

import (
	"time"

	"golang.org/x/sys/unix"
)

// setClock sets the machine's clock.
func setClock(t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return err
	}
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}
