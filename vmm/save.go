package vmm

import (
	"context"
	"time"

	"github.com/cubesandbox/cube/vmm/memory"
)

// Quiesce brings the work in a guest to rest for the moment of a save. A machine that is restored wakes at rest, and can be
// given an identity of its own before anything works in it again.
type Quiesce interface {
	// Freeze returns when nothing works in the guest but its agent. It ends with ctx. An error ends the save, unless it is
	// that the agent hasn't answered in time: that delays the save, but doesn't keep it from being made.
	Freeze(ctx context.Context) error
	// Thaw lets the work go on. It is called after each Freeze, whatever that returned and whatever became of the save,
	// when the machine runs again: after a save that leaves it still, never. An error isn't the save's: whoever implements
	// this sees to it that the work goes on.
	Thaw(ctx context.Context) error
}

// SaveRequest says how a machine is to be saved.
type SaveRequest struct {
	// Dir is an empty directory, only root's, that gets the files StateFile, MemoryFile and DiskFile of each disk that has
	// an image. They aren't synced. After an error what is there is of no use.
	Dir     string
	Quiesce Quiesce
	// DisksOnly leaves the memory out: there is neither StateFile nor MemoryFile, and no machine goes on from what is saved. What
	// the guest hadn't written to its disks is lost, which is nothing if Saved.Frozen.
	DisksOnly bool
	// Still leaves the machine standing still, its work at rest, when it has been saved: it is to be stopped, unless
	// Saved.GoOn lets it go on after all. After an error it goes on.
	Still bool
}

// The files of a saved machine.
const (
	StateFile  = "state"  // devices and CPUs
	MemoryFile = "memory" // all of the guest's memory, sparse
)

// DiskFile is the file with the image of the disk of that serial.
func DiskFile(serial string) string { return "disk-" + serial }

// Platform is what a machine is made of and with, as far as a saved one has to find it again. Kernel and agent are in its
// memory.
type Platform struct {
	// Board is the driver's version of the machine: its type and devices.
	Board int `json:"board"`
	// QEMU and Guest (kernel, initramfs, modules) are the digests by which the artefact directories are named.
	QEMU  string `json:"qemu"`
	Guest string `json:"guest"`
	// Accel executes the guest's code, with this CPU.
	Accel string `json:"accelerator"`
	CPU   string `json:"cpu"`
	// TSCKHz is what the guest takes the rate of its time stamp counter for.
	TSCKHz int `json:"tsc_khz"`
}

// SavedDisk is a disk that a saved machine has.
type SavedDisk struct {
	Serial   string `json:"serial"`
	LUN      int    `json:"lun"`
	ReadOnly bool   `json:"read_only,omitempty"`
	// Placeholder says that it is the root of a machine that never had one: it has no image.
	Placeholder bool `json:"placeholder,omitempty"`
}

// Saved is what a save has made.
type Saved struct {
	Platform Platform
	Shape    Shape
	// Parent is the snapshot that the machine was restored from, "" for a base snapshot.
	Parent string
	// Disks are all that the machine has, the modules' aside, in the order of their LUNs.
	Disks []SavedDisk
	// Frozen says that the work in the guest was at rest: Freeze has succeeded.
	Frozen bool
	// Inherited are the digests of the memory before anything was written to it, in all chunks but those in Memory.Chunks
	// that of the file. Both are of a memory that was saved.
	Inherited memory.Digests
	Memory    memory.Written
	// Stopped is how long the guest stood still.
	Stopped time.Duration
	// GoOn lets a machine go on that was left still, and thaws it. It bounds itself. nil for one that goes on already.
	GoOn func() error
}
