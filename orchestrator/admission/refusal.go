package admission

import (
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// Refusal is why there is no room. It is errdefs.ErrResourceExhausted where it is a team's share that is used up, and
// errdefs.ErrUnavailable where it is the host.
type Refusal struct {
	// Reason is one of a few words, for counters.
	Reason string
	// Team: it is the team's share.
	Team bool
	// Spared: there would be room without what is kept ready.
	Spared bool
	// After is when it may be otherwise, 0 if nobody knows.
	After   time.Duration
	message string
}

func (r *Refusal) Error() string { return r.message }

func (r *Refusal) Unwrap() error {
	if r.Team {
		return errdefs.ErrResourceExhausted
	}
	return errdefs.ErrUnavailable
}

// Reasons of a host's refusals. Those of a team's are teamPrefix and the limit's key in the configuration.
const (
	ReasonCPU       = "host_cpu"
	ReasonMemory    = "host_memory"    // it is reserved
	ReasonAvailable = "host_available" // it is used
	ReasonDisk      = "host_disk"
	ReasonQueue     = "queue"
	ReasonMachine   = "machine" // whoever makes it has said so
	pressurePrefix  = "pressure_"
	teamPrefix      = "team_"
)

// hostAfter is when a host that is full, or hard pressed, is worth another try: its averages of pressure are of ten seconds.
const hostAfter = 10 * time.Second

// Short is a refusal for want of something on the host.
func Short(reason string, after time.Duration, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, After: after, message: fmt.Sprintf(format, args...)}
}
