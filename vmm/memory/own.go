package memory

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrOwned says that another process writes to a memory.
var ErrOwned = errors.New("another machine has this memory for its own")

// Own opens a memory for the one process that may write to it: two guests in one memory ruin each other. It is that
// process's until the last copy of the descriptor is closed, wherever it has been handed to; until then everybody else gets
// ErrOwned.
func Own(f *os.File) (*os.File, error) {
	// A lock of its own, which f and its other copies don't have.
	own, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(own.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrOwned
	}
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}
	return own, nil
}

// Common opens a memory that any number of processes may have copies of, each its own. It must be sealed and have that size.
func Common(f *os.File, size int64) (*os.File, error) {
	if err := isSealed(f, size); err != nil {
		return nil, fmt.Errorf("the memory can't be common to several machines: %w", err)
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}
