// Package saved is what a shim writes down of a pod whose machine it saves: beside the machine what runs in it (Pod), and in
// a checkpoint of containerd's which snapshot it is (Checkpoint).
package saved

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
)

// format changes with what is written.
const format = 1

// Purpose is what a snapshot is there for, if not for its name. When its reason is gone, so is the need for the snapshot.
type Purpose string

const (
	// ForPause: a paused container goes on from it. The reason is the checkpoint in the directory of paused containers that names it.
	ForPause Purpose = "pause"
	// ForClone: clones are being made of it. The reason is the process that makes them.
	ForClone Purpose = "clone"
)

// Valid tells whether it is a purpose that snapshots have, or none.
func (p Purpose) Valid() bool { return p == "" || p == ForPause || p == ForClone }

// Pod is what a saved machine has in it, as the shim knew it when the work in the guest had come to rest.
type Pod struct {
	Format    int    `json:"format"`
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	// Purpose is why there is the snapshot. One that has none is somebody's who knows its name.
	Purpose Purpose `json:"purpose,omitempty"`
	// Last: the machine has ended with it. What is made of it goes on with what was under way in its streams.
	Last bool `json:"last,omitempty"`
	// Event is the last of the agent's events that all this takes account of. The agent tells of later ones again.
	Event uint64 `json:"event"`
	// Containers are those that ran, or were paused.
	Containers []Container `json:"containers"`
	// Ended are those that had ended, but that the guest still has, with their disks.
	Ended []Ended `json:"ended,omitempty"`
}

// Ended is a container that has ended, and that nobody has deleted.
type Ended struct {
	Guest string   `json:"guest"` // its id in the guest
	Disks []string `json:"disks"`
}

// Container is one of them.
type Container struct {
	ID string `json:"id"`
	// Guest is its id in the guest, which it keeps for life, in whatever container of the host.
	Guest string `json:"guest"`
	// Spec is the digest of the OCI spec that it was made with.
	Spec string `json:"spec"`
	// Paused: it stands still, whatever becomes of the rest.
	Paused bool `json:"paused,omitempty"`
	// Disks are the serials of its root's.
	Disks []string `json:"disks"`
	// Processes are its first process, then the execs that ran.
	Processes []Process `json:"processes"`
}

// Process is one that ran in a container.
type Process struct {
	// Number is this process's alone, as an exec's id isn't: it may be used again.
	Number   uint64 `json:"number"`
	ExecID   string `json:"exec,omitempty"` // "" for the container's first
	Terminal bool   `json:"terminal,omitempty"`
	Stdin    bool   `json:"stdin,omitempty"`
	Stdout   bool   `json:"stdout,omitempty"`
	Stderr   bool   `json:"stderr,omitempty"`
}

// Encode is p for the snapshot.
func (p *Pod) Encode() (json.RawMessage, error) {
	p.Format = format
	return json.Marshal(p)
}

// Decode reads what Encode has made.
func Decode(b json.RawMessage) (*Pod, error) {
	if b == nil {
		return nil, errdefs.ErrFailedPrecondition.WithMessage("the snapshot is of no pod")
	}
	p := &Pod{}
	if err := decode(b, p); err != nil {
		return nil, fmt.Errorf("what the snapshot says of its pod: %w", err)
	}
	return p, nil
}

// Container finds one by its id on the host, nil if there is none.
func (p *Pod) Container(id string) *Container {
	for i := range p.Containers {
		if p.Containers[i].ID == id {
			return &p.Containers[i]
		}
	}
	return nil
}

// decode is strict: what is in it that isn't known may matter.
func decode(b []byte, into any) error {
	var head struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return errdefs.ErrDataLoss.WithMessage(err.Error())
	}
	if head.Format != format {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("it has format %d, this shim reads %d", head.Format, format))
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return errdefs.ErrDataLoss.WithMessage(err.Error())
	}
	return nil
}
