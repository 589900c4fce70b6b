// Package meminfo is how much memory the host has, and whether there is enough of it for another machine.
package meminfo

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
)

// Info is what the kernel says, in bytes.
type Info struct {
	Total int64
	// Available is what can be used without swapping.
	Available int64
}

// Read reads it.
func Read() (i Info, err error) { return read("/proc/meminfo") }

func read(file string) (i Info, err error) {
	f, err := os.Open(file)
	if err != nil {
		return i, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() && (i.Total == 0 || i.Available == 0) {
		key, rest, _ := strings.Cut(lines.Text(), ":")
		to := map[string]*int64{"MemTotal": &i.Total, "MemAvailable": &i.Available}[key]
		if to == nil {
			continue
		}
		var kib int64
		if _, err := fmt.Sscanf(rest, "%d kB", &kib); err != nil {
			return i, fmt.Errorf("%s: %s: %w", file, key, err)
		}
		*to = kib << 10
	}
	if err := lines.Err(); err != nil {
		return i, fmt.Errorf("%s: %w", file, err)
	}
	if i.Total == 0 {
		return i, fmt.Errorf("%s says nothing of how much memory there is", file)
	}
	return i, nil
}

// Check returns errdefs.ErrUnavailable, which says what is short, where a machine of so much memory hasn't even what is reserved for
// a disposable sandbox. Whoever starts one asks right before, whatever was promised to whom.
func Check(cfg *config.Config, memory int64) error {
	i, err := Read()
	if err != nil {
		return err
	}
	return i.check(&cfg.Admission, memory)
}

func (i Info) check(a *config.Admission, memory int64) error {
	left, least := i.Available-int64(a.MemoryHeadroom), min(memory, int64(a.DisposableMemory))
	if left >= least {
		return nil
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the host has %d MiB of memory left for machines (admission.memory_headroom = %s is kept) and this one needs %d MiB at least: end or pause one",
		max(left, 0)>>20, a.MemoryHeadroom, least>>20))
}
