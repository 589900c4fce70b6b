package lifecycle

import (
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
)

// State is what a sandbox is doing. One that is gone has no row, and no state.
type State string

const (
	Creating     State = "creating"
	Running      State = "running"
	Pausing      State = "pausing"
	Paused       State = "paused"
	Resuming     State = "resuming"
	Snapshotting State = "snapshotting" // for a snapshot or a fork; it runs, but for a moment
	Killing      State = "killing"
)

// Shown is the state that users see: Running, Paused, or "" for one that isn't there for them, not yet or no more.
func (s State) Shown() State {
	switch s {
	case Running, Snapshotting:
		return Running
	case Pausing, Paused, Resuming:
		return Paused
	}
	return ""
}

// Network is what a sandbox may reach and by what it is reached. Destinations are addresses or CIDRs; what is allowed goes
// before what is denied.
type Network struct {
	// AllowPublicTraffic: nil and true let in requests that have no traffic token.
	AllowPublicTraffic *bool    `json:"allowPublicTraffic,omitempty"`
	AllowOut           []string `json:"allowOut,omitempty"`
	DenyOut            []string `json:"denyOut,omitempty"`
	// MaskRequestHost replaces the Host of requests into the sandbox, "" leaves it; ${PORT} in it is the port.
	MaskRequestHost string `json:"maskRequestHost,omitempty"`
	// HTTPSPorts speak TLS inside of the sandbox.
	HTTPSPorts []int `json:"httpsPorts,omitempty"`
}

// Create asks for a sandbox. What can be checked without knowing the template has been.
type Create struct {
	Team string
	// Template is "[team/]name[:tag]", a template's id, or a snapshot's.
	Template string
	// Image is what it is made of instead, "" is none: a reference with its registry's host.
	Image string
	// Timeout is how long it runs before it is killed, or paused with AutoPause; above 0.
	Timeout   time.Duration
	AutoPause bool
	// AutoPauseMemory: such a pause keeps the memory, not only the disk.
	AutoPauseMemory bool
	// AutoResume: traffic has it go on when it is paused.
	AutoResume bool
	// Secure: envd asks for a token.
	Secure bool
	// AllowInternet false denies all that Network.AllowOut doesn't allow; nil is true.
	AllowInternet *bool
	Network       Network
	Metadata      map[string]string
	// Env is what processes have that envd starts.
	Env map[string]string
	// Profile is how much of what it has is reserved for it; "" is its template's.
	Profile admission.Profile
	// Ephemeral: it ends with the engine, whatever becomes of that: the next one removes it.
	Ephemeral bool
	// RequestID names the request towards the sandbox and in the log; "" has one made.
	RequestID string
}

// Sandbox is one, as it is at a moment.
type Sandbox struct {
	ID, Team   string
	TemplateID string
	// Alias is the template's name as the create had it, "" if it had an id.
	Alias   string
	BuildID string
	State   State
	// StartedAt is when it was created, or has resumed last.
	StartedAt time.Time
	// EndAt is its deadline; of a paused one, when it was paused.
	EndAt            time.Time
	CPUs             int
	MemoryMB, DiskMB int
	Metadata, Env    map[string]string
	Network          Network
	AllowInternet    *bool
	AutoPause        bool
	AutoPauseMemory  bool
	AutoResume       bool
	Secure           bool
	// EnvdToken is "" without Secure, TrafficToken where public traffic is let in.
	EnvdToken, TrafficToken string
	EnvdVersion             string
}

// Cursor is a place in a list, behind an element; the zero Cursor is the list's beginning.
type Cursor struct {
	At time.Time
	ID string
}

// Filter says which sandboxes are listed, and how.
type Filter struct {
	// States are Running, Paused or both; none is both.
	States []State
	// Metadata: each of these has to be there.
	Metadata map[string]string
	// Template is a template's name, without a tag, or id; "" is any.
	Template     string
	StartedAfter time.Time // zero is any
	// Ascending lists the oldest start first, otherwise the newest.
	Ascending bool
	Limit     int // above 0
	After     Cursor
}

// SnapshotFilter says which snapshots are listed, newest first.
type SnapshotFilter struct {
	Sandbox string // that they were made of, "" is any
	Name    string // as Snapshot takes it, or its ID; "" is any
	Limit   int    // above 0
	After   Cursor
}

// Snapshot is a template that was made of a sandbox.
type Snapshot struct {
	// ID is what Create.Template and DeleteSnapshot take: "TEAM/NAME:TAG", or "TEMPLATE:default" without a name.
	ID        string
	Names     []string
	CreatedAt time.Time
}

// ForkResult is one child of a fork, or why there isn't one.
type ForkResult struct {
	Sandbox Sandbox
	Err     error
}

// Metric is what a sandbox used at a moment; sizes are in bytes.
type Metric struct {
	At                           time.Time
	CPUs                         int
	CPUUsedPercent               float64 // of all of its CPUs: up to 100
	MemUsed, MemTotal, MemCached int64
	DiskUsed, DiskTotal          int64
}

// Level is how much a log entry matters.
type Level string

const (
	Debug Level = "debug"
	Info  Level = "info"
	Warn  Level = "warn"
	Error Level = "error"
)

// LogQuery says which entries of a sandbox's log are asked for.
type LogQuery struct {
	// From leaves out what is older; with Backward, what is newer. Zero is the log's beginning, or its end.
	From     time.Time
	Backward bool   // newest first
	Limit    int    // above 0
	Level    Level  // and above; "" is all
	Search   string // in the message
}

// LogEntry is one.
type LogEntry struct {
	At      time.Time
	Message string
	Level   Level
	Fields  map[string]string
	// Place is where FollowLog can go on after it; "" is nowhere.
	Place string
}

// LogStart is where FollowLog begins.
type LogStart struct {
	// Tail is how many of the last entries so far are told; negative: all.
	Tail int
	// After is the Place of an entry: what follows it is told, whatever Tail is. What is no Place is errdefs.ErrInvalidArgument.
	After string
}
