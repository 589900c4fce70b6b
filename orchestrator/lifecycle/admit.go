package lifecycle

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// headroom is memory of the host's that no sandbox gets, in bytes.
const headroom = 256 << 20

// admit lets a machine of that memory be started, when it is its turn, until release is called, however often. What there isn't enough of is
// errdefs.ErrResourceExhausted where the team has its share, otherwise errdefs.ErrUnavailable.
func (e *Engine) admit(ctx context.Context, r *row) (release func(), err error) {
	err = e.stage(ctx, stageAdmit, r.ID, func(ctx context.Context) error {
		release, err = e.admitted(ctx, r.Team, r.MemoryMB)
		return err
	})
	return release, err
}

func (e *Engine) admitted(ctx context.Context, team string, memoryMB int) (release func(), err error) {
	if e.MaxSandboxes > 0 {
		n, err := e.db.Count(ctx, team, string(Creating), string(Running), string(Snapshotting), string(Resuming), string(Pausing))
		if err != nil {
			return nil, err
		}
		if n >= e.MaxSandboxes {
			return nil, errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("team %s runs %d sandboxes, which is all that it may: kill or pause one, or raise max_sandboxes", team, n))
		}
	}
	limit := e.Timeout(createTimeout)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case e.starts <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-e.life.Done():
		return nil, errClosing
	case <-timer.C:
		return nil, unavailable(fmt.Sprintf("this host starts %d sandboxes at a time, and others have been for %v", cap(e.starts), limit), 5*time.Second)
	}
	need := int64(memoryMB) << 20
	left, err := e.Memory()
	e.mu.Lock()
	left -= e.starting + headroom // what is being started doesn't have its memory yet
	if err == nil && left < need {
		err = unavailable(fmt.Sprintf("the host has %d MiB of memory left for sandboxes and this one needs %d MiB: kill or pause one", max(left, 0)>>20, memoryMB), 10*time.Second)
	}
	if err == nil {
		e.starting += need
	}
	e.mu.Unlock()
	if err != nil {
		<-e.starts
		return nil, err
	}
	return sync.OnceFunc(func() {
		e.mu.Lock()
		e.starting -= need
		e.mu.Unlock()
		<-e.starts
	}), nil
}

// available is the memory that the kernel says can be used without swapping, in bytes.
func available() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			var kib int64
			if _, err := fmt.Sscanf(rest, "%d kB", &kib); err != nil {
				return 0, fmt.Errorf("/proc/meminfo: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, errors.Join(errors.New("/proc/meminfo says nothing of what is available"), lines.Err())
}
