package volumes

import (
	"fmt"
	"os"
	"regexp"
	"sync"

	"golang.org/x/sys/unix"
)

// Shm is the /dev/shm that the containers of a pod have in common. It is made when the first one asks for it, and stays
// as long as the machine.
type Shm struct {
	// Dir is where it will be.
	Dir string

	mu   sync.Mutex // held while it is made: that takes no I/O
	made bool
}

// sizes are what the option size= takes (tmpfs(5)).
var sizes = regexp.MustCompile(`^[0-9]{1,18}[kKmMgG%]?$`)

// Path makes it, of that size ("" is the kernel's default), if need be, and returns where it is.
func (s *Shm) Path(size string) (string, error) {
	data := "mode=1777"
	if size != "" {
		if !sizes.MatchString(size) {
			return "", fmt.Errorf("%w: %q is no size of shared memory", ErrInvalid, size)
		}
		data += ",size=" + size
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.made {
		return s.Dir, nil
	}
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return "", err
	}
	if err := unix.Mount("shm", s.Dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data); err != nil {
		return "", fmt.Errorf("mount shared memory (%s): %w", data, err)
	}
	s.made = true
	return s.Dir, nil
}
