// Package identity gives a guest that has just been booted or restored what it must not share with any other: time,
// random numbers, a name.
package identity

import (
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// stepAbove is the difference above which the clock is set instead of being slewed. The kernel slews by 500 ppm, so this
// much takes 200 s.
const stepAbove = 100 * time.Millisecond

// SetClock sets the wall clock.
func SetClock(now time.Time) error {
	ts := unix.NsecToTimespec(now.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return nil
}

// CorrectClock brings the wall clock to now: by making it run a little faster or slower when that is soon done.
func CorrectClock(now time.Time) error {
	off := time.Until(now)
	if off.Abs() > stepAbove {
		return SetClock(now)
	}
	// ADJ_OFFSET_SINGLESHOT of adjtimex(2), which replaces a correction that is under way.
	const singleShot = 0x8001
	if _, err := unix.Adjtimex(&unix.Timex{Modes: singleShot, Offset: off.Microseconds()}); err != nil {
		return fmt.Errorf("slew the clock by %v: %w", off, err)
	}
	return nil
}

// Entropy limits, in bytes.
const (
	MinEntropy = 32
	MaxEntropy = 256
)

// Reseed mixes the host's random bytes in, credits them, and makes the kernel's generator take them up at once, so that
// nothing it hands out from here on was determined by a memory image that others share.
func Reseed(entropy []byte) error {
	if len(entropy) < MinEntropy || len(entropy) > MaxEntropy {
		return fmt.Errorf("%d bytes of entropy; %d to %d are needed", len(entropy), MinEntropy, MaxEntropy)
	}
	f, err := os.OpenFile("/dev/random", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info (include/uapi/linux/random.h)
	var info struct {
		bits, size int32
		bytes      [MaxEntropy]byte
	}
	info.size = int32(copy(info.bytes[:], entropy))
	info.bits = info.size * 8
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info))); errno != 0 {
		return fmt.Errorf("add entropy: %w", errno)
	}
	clear(info.bytes[:])
	if err := unix.IoctlSetInt(int(f.Fd()), unix.RNDRESEEDCRNG, 0); err != nil {
		return fmt.Errorf("reseed the random number generator: %w", err)
	}
	return nil
}
