package db

import (
	"encoding/json"
	"time"
)

// DefaultTag is the tag of what is asked for without one.
const DefaultTag = "default"

// Template is what sandboxes are made of: builds, by tag. A snapshot of a sandbox is one, too.
type Template struct {
	ID, Team string
	// Public: all teams may use it.
	Public bool
	// Names are without the team, sorted.
	Names []string
	// Origin is the sandbox that it is a snapshot of, "" of a template.
	Origin               string
	CreatedAt, UpdatedAt time.Time
	SpawnedAt            time.Time // when a sandbox was last made of it, zero if never
	Spawns               int64
	Builds               int
}

// Build is one version of a template: a snapshot of a machine, and what is to be known of it.
type Build struct {
	ID       string // a UUID
	Template string // its id
	// Snapshot is its name in the store of snapshots.
	Snapshot         string
	CreatedAt        time.Time
	CPUs             int
	MemoryMB, DiskMB int
	Settings         Settings
}

// Settings is what a build says of sandboxes that are made of it.
type Settings struct {
	EnvdVersion string `json:"envdVersion"`
	// User and Workdir are the defaults of processes and files.
	User    string `json:"user,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	// Hook is told who the sandbox is before anybody else gets to it.
	Hook *Hook `json:"hook,omitempty"`
	// Start is the command that is started in each sandbox, where none runs already in the snapshot.
	Start *Start `json:"start,omitempty"`
	// Origin is the snapshot maker's: what has to be known to make a container of the snapshot.
	Origin json.RawMessage `json:"origin,omitempty"`
}

// Hook is an HTTP endpoint in the sandbox.
type Hook struct {
	Port int    `json:"port"`
	Path string `json:"path"`
}

// Start is a command line of the default user's login shell.
type Start struct {
	Command string `json:"command"`
}
