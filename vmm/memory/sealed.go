package memory

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// seals make a file's content final: for every process, through every descriptor, for ever (memfd_create(2)).
const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

// Seal copies size bytes of src into a memory file that nobody can change, and returns it with the digests of what was
// copied. Holes stay holes.
func Seal(src *os.File, size int64) (*os.File, Digests, error) {
	var d digester
	f, err := seal(src, size, d.add)
	return f, d.all(), err
}

// SealKnown is Seal for what has been checked already: most of the time goes into the digests.
func SealKnown(src *os.File, size int64) (*os.File, error) {
	return seal(src, size, func(int64, []byte) {})
}

func seal(src *os.File, size int64, see func(off int64, chunk []byte)) (_ *os.File, err error) {
	f, err := memfd("guest memory")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if err := copyData(f, src, size, see); err != nil {
		return nil, err
	}
	if err := addSeals(f); err != nil {
		return nil, err
	}
	return f, nil
}

// sealTries is how often a memory that is busy is sealed: the kernel waits for up to 150 ms each time (memfd_wait_for_pins in its mm/memfd.c).
const sealTries = 40

// addSeals seals a memory that nobody maps. Whoever looks after the host's pages holds one of them for a moment (reclaim, compaction,
// DAMON), and the kernel can't tell such a one from somebody who writes.
func addSeals(f *os.File) (err error) {
	for range sealTries {
		if _, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("seal the memory: %w", err)
	}
	return nil
}

// Scratch is an empty memory of that size, for a machine that is to fill it.
func Scratch(size int64) (*os.File, error) {
	f, err := memfd("guest memory")
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func memfd(name string) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // MFD_NOEXEC_SEAL is of Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("make a memory file: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// isSealed checks that f can't change any more and has that size.
func isSealed(f *os.File, size int64) error {
	got, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("it has no seals: %w", err)
	}
	if got&seals != seals {
		return fmt.Errorf("its seals are %#x", got)
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() != size {
		return fmt.Errorf("its size is %d, not %d", info.Size(), size)
	}
	return nil
}
