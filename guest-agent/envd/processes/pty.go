package processes

import (
	"fmt"
	"math"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// Size is a terminal's, in characters.
type Size struct {
	Columns, Rows uint32
}

func (s Size) window() (*unix.Winsize, error) {
	if s.Columns > math.MaxUint16 || s.Rows > math.MaxUint16 {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("a terminal of %d by %d; the kernel takes %d", s.Columns, s.Rows, math.MaxUint16))
	}
	return &unix.Winsize{Col: uint16(s.Columns), Row: uint16(s.Rows)}, nil
}

// openPTY makes a terminal that belongs to the user. The master doesn't block: its reads and writes can be interrupted.
func openPTY(size Size, u users.User) (master, slave *os.File, err error) {
	window, err := size.window()
	if err != nil {
		return nil, nil, err
	}
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, fmt.Errorf("unlock a terminal: %w", err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, window); err != nil {
		return nil, nil, fmt.Errorf("size a terminal: %w", err)
	}
	// By the master and not by name: /dev/pts may be another one.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, nil, fmt.Errorf("open a terminal's other end: %w", errno)
	}
	slave = os.NewFile(peer, "terminal")
	// The group stays that of terminals.
	if err := slave.Chown(int(u.UID), -1); err != nil {
		slave.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

// resize sets the terminal's size; its processes hear of it by SIGWINCH.
func resize(master *os.File, size Size) error {
	window, err := size.window()
	if err != nil {
		return err
	}
	c, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioctl error
	if err := c.Control(func(fd uintptr) { ioctl = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, window) }); err != nil {
		return err
	}
	return ioctl
}
