// Package tsc measures the rate of the processor's time stamp counter. A guest under emulation reads the host's counter
// and can't calibrate it on a loaded host, so it must be told.
package tsc

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// window is how long the counter is watched. With both ends known to about 100 ns the result is good to 10 ppm.
const window = 20 * time.Millisecond

// read is RDTSC.
func read() uint64

// KHz returns the rate of the counter against CLOCK_MONOTONIC_RAW. It takes about 20 ms.
func KHz() (int, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c0, t0, err := sample()
	if err != nil {
		return 0, err
	}
	time.Sleep(window)
	c1, t1, err := sample()
	if err != nil {
		return 0, err
	}
	if c1 <= c0 || t1 <= t0 {
		return 0, errors.New("the time stamp counter does not advance")
	}
	khz := math.Round(float64(c1-c0) / float64(t1-t0) * 1e6)
	if khz < 1e5 || khz > 2e7 { // 100 MHz to 20 GHz
		return 0, fmt.Errorf("the time stamp counter runs at an unlikely %.0f kHz", khz)
	}
	return int(khz), nil
}

// sample reads counter and clock together: of several attempts, the one with the least time between two reads of the
// counter, so that an interrupt in between does no harm.
func sample() (counter uint64, nanos int64, err error) {
	best := uint64(math.MaxUint64)
	for range 16 {
		var ts unix.Timespec
		before := read()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
			return 0, 0, fmt.Errorf("read the clock: %w", err)
		}
		if after := read(); after-before < best {
			best, counter, nanos = after-before, before+(after-before)/2, ts.Nano()
		}
	}
	return counter, nanos, nil
}
