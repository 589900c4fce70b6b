package admission

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// pressedWindow is the time that Pressed is of, as averages of pressure are. The kernel has no longer one.
const pressedWindow = 10 * time.Second

// Pressed returns nil when something on the host has waited for memory in so many percent of the last ten seconds, from the call on.
// The error is the context's, or says why the kernel doesn't tell.
func (p *Proc) Pressed(ctx context.Context, percent int) error {
	return p.pressed(ctx, "memory", pressedWindow*time.Duration(percent)/100, pressedWindow)
}

// pressed waits until something has waited for that so long within a window: the kernel tells (Documentation/accounting/psi.rst).
func (p *Proc) pressed(ctx context.Context, what string, most, window time.Duration) (err error) {
	file := p.dir + "/pressure/" + what
	defer func() {
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("%s: %w", file, err)
		}
	}()
	before, err := waited(file)
	if err != nil {
		return err
	}
	fd, err := unix.Open(file, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, fmt.Appendf(nil, "some %d %d\x00", most.Microseconds(), window.Microseconds())); err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	defer context.AfterFunc(ctx, func() { w.Close() })()
	for {
		wait := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}, {Fd: int32(r.Fd()), Events: unix.POLLIN}}
		_, err := unix.Poll(wait, -1)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case wait[1].Revents != 0:
			return context.Cause(ctx)
		case wait[0].Revents&unix.POLLPRI != 0:
			// A trigger also tells, once, of what was waited before there was any.
			if all, err := waited(file); err != nil || all-before >= most {
				return err
			}
		default:
			return fmt.Errorf("its trigger has ended (%#x)", wait[0].Revents)
		}
	}
}

// waited is for how long something has waited, in a file of the kernel's, since it runs.
func waited(file string) (time.Duration, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	_, total, _ := strings.Cut(line, " total=")
	us, err := strconv.ParseInt(total, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q has no total", line)
	}
	return time.Duration(us) * time.Microsecond, nil
}
