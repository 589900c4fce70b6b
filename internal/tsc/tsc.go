// Package tsc measures the rate of the processor's time stamp counter. A guest under emulation reads the host's counter
// and can't calibrate it on a loaded host, so it must be told.
package tsc

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
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
	khz := int(math.Round(float64(c1-c0) / float64(t1-t0) * 1e6))
	if !plausible(khz) {
		return 0, fmt.Errorf("the time stamp counter runs at an unlikely %d kHz", khz)
	}
	return khz, nil
}

// Cached is KHz, once per boot of the host: the result is kept in the file at path.
func Cached(path string) (int, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return 0, err
	}
	var keptBoot string
	var khz int
	if b, err := os.ReadFile(path); err == nil {
		if n, _ := fmt.Sscan(string(b), &keptBoot, &khz); n == 2 && keptBoot == strings.TrimSpace(string(boot)) && plausible(khz) {
			return khz, nil
		}
	}
	if khz, err = KHz(); err != nil {
		return 0, err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tsc-*")
	if err != nil {
		return 0, err
	}
	_, err = fmt.Fprintf(tmp, "%s %d\n", strings.TrimSpace(string(boot)), khz)
	if err := errors.Join(err, tmp.Close()); err != nil {
		return 0, errors.Join(err, os.Remove(tmp.Name()))
	}
	return khz, os.Rename(tmp.Name(), path)
}

// plausible is 100 MHz to 20 GHz.
func plausible(khz int) bool { return khz > 1e5 && khz < 2e7 }

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
