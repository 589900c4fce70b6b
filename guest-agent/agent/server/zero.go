package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// zeroChunk is what is filled between two looks at the free memory.
	zeroChunk = 4 << 20
	// zeroMost bounds what is filled: a large machine has memory that it has never touched, which is zero as it is and
	// would cost the host real memory.
	zeroMost = 256 << 20
	// zeroReserve is what the kernel and the agent keep at least, so that nobody runs out of memory meanwhile.
	zeroReserve = 16 << 20
	// zeroTime bounds the time that it takes, which is a second in an emulated machine on an idle host: a save that is
	// larger than need be is better than none.
	zeroTime = 10 * time.Second
)

// zeroFree fills free memory with zeros, which a saved memory file doesn't store. It takes the memory, which the kernel
// clears for that, and gives all of it back. What the kernel keeps for itself stays as it is.
func zeroFree(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, zeroTime)
	defer cancel()
	var held [][]byte
	defer func() {
		for _, b := range held {
			err = errors.Join(err, unix.Munmap(b))
		}
	}()
	for len(held) < zeroMost/zeroChunk && ctx.Err() == nil {
		var info unix.Sysinfo_t
		if err := unix.Sysinfo(&info); err != nil {
			return fmt.Errorf("free memory: %w", err)
		}
		if uint64(info.Freeram)*uint64(info.Unit) < zeroChunk+zeroReserve {
			return nil
		}
		b, err := unix.Mmap(-1, 0, zeroChunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return fmt.Errorf("take free memory: %w", err)
		}
		held = append(held, b)
		if err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); err != nil {
			return fmt.Errorf("take free memory: %w", err)
		}
	}
	return nil
}
