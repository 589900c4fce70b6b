// Package vmm is the virtual machine as the rest of Cube sees it: what a machine is (Machine), how one is asked for
// (Request) and who makes them (Launcher). Drivers are in the packages below. It knows nothing of containers, of the
// agent's protocol or of containerd.
package vmm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
)

// Errors that a Machine's methods return, wrapped with what was being done.
var (
	// ErrGone says that the machine has ended; Machine.Err tells why.
	ErrGone = errors.New("the virtual machine is gone")
	// ErrNoDisk says that no disk of that serial is plugged in.
	ErrNoDisk = errors.New("no such disk")
)

// Shape is what a machine is made of. Base snapshots exist per shape.
type Shape struct {
	VCPUs     int
	MemoryMiB int
}

func (s Shape) String() string { return fmt.Sprintf("%d vCPU, %d MiB", s.VCPUs, s.MemoryMiB) }

// RootSerial is the serial of Request.Root. No other disk may have it.
const RootSerial = "root"

// MAC is the address of the network card of every machine, so that a restored one has nothing to re-address. It is
// locally administered.
var MAC = net.HardwareAddr{0x02, 'c', 'u', 'b', 'e', 0x01}

// Request asks a Launcher for a machine.
type Request struct {
	// ID is the container's (or pod's) id. It is QEMU's -name, the cgroup's name, and the word to look for in ps.
	ID string
	// Dir is a directory of the machine's own, which exists, is empty and is only root's. The launcher keeps there
	// what Cleanup needs to undo everything after a kill -9.
	Dir string
	// Shape is the least that the machine must have; the launcher rounds it up to its ladder.
	Shape Shape
	// CPULimit is the host CPU time the whole machine may use, in CPUs (1.5 = 150 %). 0, or more than it has vCPUs = as
	// many as it has vCPUs.
	CPULimit float64
	// NetNS is the path of the network namespace that QEMU is put in, "" for a new, empty one.
	NetNS string
	// Tap, if set, is the host's end of the machine's network card: the descriptor of a tap made with IFF_TAP, IFF_NO_PI and
	// IFF_VNET_HDR, and not attached to anything else. It may be of any network namespace. Offloads and the size of the
	// header are set as the card has them. Without it the card leads nowhere. The caller closes Tap when it likes; the
	// last descriptor, with the machine's end, takes the carrier away.
	Tap *os.File
	// Root, if set, is a raw image, opened for reading and writing, that is the machine's first disk from the start:
	// under emulation that saves the guest the better part of what AddDisk costs it. Its serial is RootSerial, and
	// RemoveDisk takes it. The guest was saved before it had the disk, so it takes it to have RootBytes, whatever the
	// image's size: it must go by what is in the image. The caller closes Root when it likes.
	Root *os.File
	// Snapshot, if set, is the id of a snapshot that the machine goes on from. Its shape and its disks are those of the
	// snapshot: Shape and Root aren't given. The work in it is at rest, if it was when it was saved.
	Snapshot string
	// DiskDir is where the images of the disks of a machine from a snapshot are made, named by DiskFile: a directory that
	// exists, is only root's, and is on the store's file system, where that takes no time. The images are the machine's own
	// and stay when it ends: whoever owns the directory removes them. After an error Launch leaves none.
	DiskDir string
}

// RootBytes is what the guest takes the size of Request.Root for, and the most that it may be: as much as ext4 can be
// with blocks of 4 KiB.
const RootBytes = 16 << 40

// Disk is an image to plug in.
type Disk struct {
	// Serial is how the guest finds the disk: 1–20 characters of [a-z0-9-], unique in the machine.
	Serial string
	// File is the raw image, opened read-write unless ReadOnly. AddDisk passes a duplicate to QEMU; the caller closes
	// File when it likes.
	File *os.File
	// ReadOnly makes the disk read-only for the guest and QEMU alike.
	ReadOnly bool
}

// Launcher makes machines.
type Launcher interface {
	// Launch returns a running machine whose agent channel is open, or an error that says what failed at which stage
	// (*BootError when the guest or QEMU didn't come up, *LimitError for a shape that isn't possible). The guest has
	// answered once in the life that the machine continues, but nobody has used this channel yet: what comes first may
	// be the rest of a talk with somebody else, and whether the guest is alive shows when it answers. The first machine
	// of a shape takes as long as a boot. On error nothing is left, r.Dir included.
	Launch(ctx context.Context, r Request) (Machine, error)
	// Restorable says what keeps the machine of a snapshot from being restored on this host: errdefs.ErrFailedPrecondition if
	// it is for good.
	Restorable(ctx context.Context, snapshot string) error
	// Room is asked before anything is made in the store that isn't needed by what runs. Where the store is too full for
	// that it first removes what can be made again; if that isn't enough it is errdefs.ErrResourceExhausted.
	Room(ctx context.Context) error
}

// Machine is one running virtual machine. All methods may be called from many goroutines. After the machine has ended
// each of them returns an error that wraps ErrGone, at once.
type Machine interface {
	// Shape is what the machine really has.
	Shape() Shape
	// PID is the host pid of the process that is the machine (QEMU). Never 0; stays the same after the end.
	PID() int
	// Agent is the byte channel to the agent in the guest. There is one; whoever takes it owns it. It reads EOF when
	// the machine ends.
	Agent() net.Conn
	// Tap is another descriptor of the tap that the machine was made with, nil if it was made without: for the machine that
	// is to take its place. The caller closes it.
	Tap() (*os.File, error)
	// AddDisk plugs a disk in while the guest runs. It returns when the device exists for QEMU; the guest sees it a
	// little later.
	AddDisk(ctx context.Context, d Disk) error
	// RemoveDisk unplugs the disk with that serial and returns when the guest has let it go. The guest must have
	// unmounted it.
	RemoveDisk(ctx context.Context, serial string) error
	// Pause stops the vCPUs. Idempotent.
	Pause(ctx context.Context) error
	// Resume lets the vCPUs go on. Idempotent.
	Resume(ctx context.Context) error
	// SetCPULimit changes the host CPU time the whole machine may use; see Request.CPULimit. Idempotent.
	SetCPULimit(ctx context.Context, cpus float64) error
	// Save writes the running machine, as it is at one moment, into a directory, and has it go on, whatever comes of it,
	// unless the request is to leave it still. Disks are neither plugged in nor removed meanwhile, nor is the machine
	// paused: that waits. A paused machine isn't saved.
	Save(ctx context.Context, r SaveRequest) (*Saved, error)
	// Waiting tells whether the machine stands still because the store is full; it goes on by itself when there is
	// space. A guest that doesn't answer meanwhile isn't dead.
	Waiting() bool
	// Console is the tail (at most 64 KiB) of what the guest wrote to its console.
	Console() []byte
	// Done is closed once, when the machine has ended and its process has been reaped.
	Done() <-chan struct{}
	// Err says why the machine ended: nil before Done is closed and when Stop has ended it (or was waiting for its
	// end), otherwise a *DeathError.
	Err() error
	// Stop ends the machine: it waits until ctx's deadline for a guest that is powering itself off, then ends it
	// with QMP quit, then with SIGKILL, and frees all that Launch acquired, r.Dir included. Idempotent; nil when
	// nothing is left.
	Stop(ctx context.Context) error
}

// BootError says at which stage a machine failed to come up, with the console's tail.
type BootError struct {
	Stage   string // "start", "boot", "restore", "agent"
	Console string // the last lines of the guest's console and of QEMU's stderr
	Err     error
}

func (e *BootError) Error() string {
	return withConsole(fmt.Sprintf("virtual machine failed at stage %s: %v", e.Stage, e.Err), e.Console)
}
func (e *BootError) Unwrap() error { return e.Err }

// DeathError says how a machine that nobody stopped has ended.
type DeathError struct {
	Reason  string // QEMU's exit ("signal: killed", "exit status 1") or the guest's ("guest powered off", "guest panicked")
	Console string
	Killed  bool // by SIGKILL: from outside, or for the memory limit of its cgroup
}

func (e *DeathError) Error() string {
	return withConsole("virtual machine ended: "+e.Reason, e.Console)
}
func (e *DeathError) Unwrap() error { return ErrGone }

func withConsole(msg, console string) string {
	if console == "" {
		return msg
	}
	return msg + "; console: " + console
}

// LimitError is a request for more, or less, than this host's configuration allows.
type LimitError struct {
	What            string // "vCPUs", "MiB of memory"
	Asked, Min, Max int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%d %s asked for, but %d to %d are possible here", e.Asked, e.What, e.Min, e.Max)
}

// InvalidParameter makes it an errdefs.ErrInvalidArgument.
func (e *LimitError) InvalidParameter() {}
