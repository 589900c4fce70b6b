// Package saved is what a shim writes down of a pod whose machine it saves: beside the machine what runs in it (Pod), and in
// a checkpoint of containerd's which snapshot it is (Checkpoint).
package saved

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

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
	// Event is the last of the agent's events that all this takes account of. The agent tells of later ones again.
	Event uint64 `json:"event"`
	// Containers are those that ran, or were paused.
	Containers []Container `json:"containers"`
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

// Checkpoint is all that is in the directory of a checkpoint. The snapshot that it names is there until somebody deletes
// it by name.
type Checkpoint struct {
	Format    int    `json:"format"`
	Snapshot  string `json:"snapshot"`
	Container string `json:"container"` // its id on the host
}

const (
	checkpointFile = "cube-checkpoint.json"
	maxCheckpoint  = 4 << 10
)

// Write writes the checkpoint to the directory, whole or not at all, in place of one that is there.
func (c Checkpoint) Write(dir string) error {
	c.Format = format
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	path := filepath.Join(dir, checkpointFile)
	if err := writeSynced(path+".new", b); err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	return nil
}

func writeSynced(path string, b []byte) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}

// ReadCheckpoint reads the checkpoint in a directory.
func ReadCheckpoint(dir string) (Checkpoint, error) {
	var c Checkpoint
	f, err := os.Open(filepath.Join(dir, checkpointFile))
	if err != nil {
		return c, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s has no checkpoint that this runtime has made: %v", dir, err))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxCheckpoint))
	if err == nil {
		err = decode(b, &c)
	}
	if err != nil {
		return c, fmt.Errorf("the checkpoint %s: %w", f.Name(), err)
	}
	return c, nil
}
