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

// queueTimeout bounds how long a start waits for its turn: E2B's SDKs wait a minute for an answer, and the machine takes its part of
// that.
const queueTimeout = 30 * time.Second

// admission is that a machine may be started. Its functions can be called more than once.
type admission struct {
	// counted says that the sandbox's row has it run, which counts by itself from then on.
	counted func()
	// release says that the machine is up, or isn't going to be.
	release func()
}

// admit lets a machine of that memory be started, when it is its turn, until it is released. What there isn't enough of is
// errdefs.ErrResourceExhausted where the team has its share, otherwise errdefs.ErrUnavailable.
func (e *Engine) admit(ctx context.Context, r *row) (a admission, err error) {
	err = e.stage(ctx, stageAdmit, r.ID, func(ctx context.Context) error {
		if a.counted, err = e.share(r.Team); err != nil {
			return err
		}
		start, err := e.turn(ctx, r.MemoryMB)
		if err != nil {
			a.counted()
			return err
		}
		a.release = func() { a.counted(); start() }
		return nil
	})
	return a, err
}

// share lets a team run one sandbox more.
func (e *Engine) share(team string) (counted func(), err error) {
	if e.MaxSandboxes == 0 {
		return func() {}, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.admitted[team]
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil && r.Team == team && r.State != Paused && r.State != Killing {
			n++
		}
	}
	if n >= e.MaxSandboxes {
		return nil, errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("team %s runs %d sandboxes, which is all that it may: kill or pause one, or raise max_sandboxes", team, n))
	}
	e.admitted[team]++
	return sync.OnceFunc(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.admitted[team]--; e.admitted[team] == 0 {
			delete(e.admitted, team)
		}
	}), nil
}

// turn waits until a machine of that memory can be started, which lasts until release.
func (e *Engine) turn(ctx context.Context, memoryMB int) (release func(), err error) {
	limit := e.Timeout(queueTimeout)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case e.starts <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-e.life.Done():
		return nil, errClosing
	case <-timer.C:
		return nil, noRoom(fmt.Sprintf("this host starts %d sandboxes at a time, and others have been before this one for %v: try again", cap(e.starts), limit), 5*time.Second)
	}
	need := int64(memoryMB) << 20
	left, err := e.Memory()
	e.mu.Lock()
	left -= e.starting + headroom // what is being started doesn't have its memory yet
	if err == nil && left < need {
		err = noRoom(fmt.Sprintf("the host has %d MiB of memory left for sandboxes and this one needs %d MiB: kill or pause one", max(left, 0)>>20, memoryMB), 10*time.Second)
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
