package templates

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// roomTimeout bounds how long a build waits for room on the host.
const roomTimeout = 10 * time.Minute

// admit sets aside what one machine of the template's takes, with a disk of that size, until done. Where the host has no room for it now, it is asked again when
// it has said that there may be some: no event tells.
func (m *making) admit(ctx context.Context, diskMB int) (done func(), err error) {
	limit := m.Config.Timeout(roomTimeout)
	wctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	short := "" // of what it has been told that there isn't enough
	for {
		done, err := m.Room.AdmitBuild(wctx, admission.Shape{VCPUs: m.CPUs, MemoryMB: m.MemoryMB, DiskMB: diskMB})
		refusal := (*admission.Refusal)(nil)
		if !errors.As(err, &refusal) || refusal.After == 0 {
			return done, err
		}
		if refusal.Reason != short {
			short = refusal.Reason
			m.tell(stepBase, lifecycle.Warn, fmt.Sprintf("waiting for room, at most %v: %v", limit, refusal))
		}
		again := time.NewTimer(refusal.After)
		select {
		case <-again.C:
		case <-wctx.Done():
			again.Stop()
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			return nil, fmt.Errorf("there was no room within %v: %w", limit, err)
		}
	}
}
