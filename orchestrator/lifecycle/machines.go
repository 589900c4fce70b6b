package lifecycle

import (
	"context"
	"encoding/json"
	"net/netip"
)

// Machines are what sandboxes are made of. A call is done when it returns, whole or not at all but where it says otherwise; one
// whose context ends is given up and undone. Calls about one sandbox come one after another, but for Look, and for Kill after what is
// given up.
// Errors are of the classes of errdefs.
type Machines interface {
	// Create makes a running machine, with nothing in it told who it is, and returns where it is reached.
	Create(ctx context.Context, m Machine) (netip.Addr, error)
	// Begin makes one that goes on from no other, with nothing in it told who it is, and returns what Machine.Container is of snapshots
	// of it.
	Begin(ctx context.Context, b Beginning) (addr netip.Addr, container json.RawMessage, err error)
	// Pause saves a machine to disk and ends it. Without memory it is its disk that is kept, and what runs in it is given the
	// time to write there what it has. After an error, Look tells what has come of it.
	Pause(ctx context.Context, id string, memory bool) error
	// Resume has a paused machine go on. Without memory it boots with its disk, and so does one whose memory can't be had here any
	// more: note says why then. After an error, Look tells what has come of it.
	Resume(ctx context.Context, id string, memory bool) (addr netip.Addr, note string, err error)
	// Save makes a snapshot by that name of a running machine, which goes on.
	Save(ctx context.Context, id, snapshot string) error
	// Rollback puts a running machine back to a snapshot of itself. After an error it is as it was, or Look tells that it isn't.
	Rollback(ctx context.Context, id, snapshot string) error
	// Forget deletes a snapshot, if there is one. Machines that are of it go on.
	Forget(ctx context.Context, snapshot string) error
	// Sweep removes what machines have left that ended while they were saved.
	Sweep(ctx context.Context) error
	// Hold has a running machine stand still until Release, with its memory where it is: it takes no CPU, and can only be released
	// or killed. Whoever looks sees that it runs.
	Hold(ctx context.Context, id string) error
	// Release has it go on, with its clock put right. After an error the machine is to be killed.
	Release(ctx context.Context, id string) error
	// SetNetwork replaces what a running machine reaches, and will after a resume.
	SetNetwork(ctx context.Context, id string, n Egress) error
	// Kill ends a machine in whatever state, or a paused one, and removes all that there is of it, if there is anything.
	Kill(ctx context.Context, id string) error
	// Look tells what has become of a machine.
	Look(ctx context.Context, id string) (Seen, error)
	// All tells that of all machines that Create has made and Kill has not removed, also of those that are half of either.
	All(ctx context.Context) (map[string]Seen, error)
	// Watch calls changed with each machine that begins or ends, however, until ctx ends or there is no telling any more. It calls ready
	// when nothing from then on is left out.
	Watch(ctx context.Context, ready func(), changed func(id string)) error
	// Traffic tells what a running machine has sent and received.
	Traffic(ctx context.Context, id string) (Traffic, error)
	// Use tells what running machines take of the host, as far as it is known.
	Use(ctx context.Context) (map[string]HostUse, error)
	// Log reads what a machine has written.
	Log(ctx context.Context, id string, q LogQuery) ([]LogEntry, error)
	// FollowLog calls each with the entries of that from a start on. Unless ended is nil, it goes on with what is written until ended
	// is closed or ctx ends, which is no error.
	FollowLog(ctx context.Context, id string, from LogStart, ended <-chan struct{}, each func(LogEntry) error) error
}

// Machine asks for one.
type Machine struct {
	ID, Team string
	// Snapshot is its origin in the store of snapshots, Container what was said about that when it was made.
	Snapshot  string
	Container json.RawMessage
	Network   Egress
}

// Beginning is what a machine begins with that goes on from no other.
type Beginning struct {
	ID, Team string
	// Image is one that is here. Disk is a snapshot of a machine that began with it, whose disk takes the place of the image's; "" is
	// none.
	Image, Disk string
	// Args are arguments of envd, which is the first process; Env are added to the image's variables.
	Args, Env              []string
	CPUs, MemoryMB, DiskMB int
	Network                Egress
}

// Egress is what a machine reaches: all but DenyOut, and of that what AllowOut has, each an address or CIDR; nothing of the host
// and its networks.
type Egress struct {
	AllowOut, DenyOut []string
}

// egress is what a row's settings say.
func (r *row) egress() Egress {
	e := Egress{AllowOut: r.Network.AllowOut, DenyOut: r.Network.DenyOut}
	if r.AllowInternet != nil && !*r.AllowInternet {
		e.DenyOut = append([]string{"0.0.0.0/0"}, e.DenyOut...)
	}
	return e
}

// Seen is what has become of a machine.
type Seen struct {
	State Presence
	Addr  netip.Addr // of one that runs
	// Why says how one that isn't there has ended, as far as that is known.
	Why string
}

// Presence is whether there is a machine.
type Presence int

const (
	Absent Presence = iota // or half of one
	Runs
	Still // paused to disk
)
