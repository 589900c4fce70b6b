package doctor

import (
	"time"

	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/leftover"
	"github.com/cubesandbox/cube/snapshotter/store"
)

// Facts is what there is to know of a host. An error in it is part of what was found.
type Facts struct {
	Root bool // whether this runs as root

	Host    Host
	Memory  uint64 // bytes that are available
	Guest   Artefact
	QEMU    Artefact
	Store   store.Status
	StoreAt error // why there can't be a store
	TUN     error // nil: a tap can be made
	BPF     BPF
	Network Network // looked at by root only
	CGroups CGroups
	// FileSystems are those that the kernel can mount.
	FileSystems []string
	LoopControl error
	Sockets     Sockets
	Tools       []Tool
	Accelerator Accelerator
	Leftovers   leftover.Report
}

// Host is what kind of machine this is.
type Host struct {
	Kernel string // uname -r
	Arch   string // as Go calls it
	OS     string // as the distribution calls itself
	CPUs   int
	// Virtual is what virtualises this host, "" for real hardware.
	Virtual string
	Docker  bool // whether this is inside a container
}

// Artefact is a directory that set-up makes.
type Artefact struct {
	Dir      string
	Version  string // of what matters in it, for people
	Err      error  // missing, or not what its digest says
	Duration time.Duration
}

// CGroups is how control groups are mounted.
type CGroups struct {
	Mode        string // v1, v2, hybrid
	Controllers []string
	Err         error
}

// Sockets is who listens on this stack's sockets.
type Sockets struct {
	Up      int           // pid of the `cube up` that runs, 0 for none
	Report  health.Report // what it says, if it runs
	Err     error         // why it doesn't say it
	Foreign string        // a socket of this stack on which someone else listens
	// Address is the existing containerd's, Containerd its version, and ContainerdErr why it can't be used.
	Address       string
	Containerd    string
	ContainerdErr error
}

// Tool is a program.
type Tool struct {
	Name     string
	Path     string
	Version  string
	Err      error
	Required bool
	Remedy   string
}

// Accelerator is what machines run under.
type Accelerator struct {
	Name   string // kvm or tcg
	Reason string
	Err    error
}
