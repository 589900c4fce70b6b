package api

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Snapshot is what is told of one.
type Snapshot struct {
	Name    string    `json:"name"`
	Created time.Time `json:"created,omitzero"`
	// Purpose is what it is there for, if not for its name: "pause" or "clone".
	Purpose saved.Purpose `json:"purpose,omitempty"`
	// Parent is the snapshot that the machine came from, which need not be there any more.
	Parent string `json:"parent,omitempty"`
	// Pod is the container, or pod of several, that was saved.
	Pod        string   `json:"pod,omitempty"`
	Containers []string `json:"containers,omitempty"`
	VCPUs      int      `json:"vcpus,omitempty"`
	Memory     int64    `json:"memory,omitempty"` // the machine's, in bytes
	QEMU       string   `json:"qemu,omitempty"`   // digests of what it runs with
	Guest      string   `json:"guest,omitempty"`
	// AtRest: the work in the guest stood still. Otherwise the snapshot can be rolled back to, and nothing else be made of it.
	AtRest bool `json:"at_rest"`
	// UsedBy are the pods whose machines were made from it.
	UsedBy []string `json:"used_by,omitempty"`
	// Team is whose it is, and Key the id of the API key that has made it, "" for what is of no team.
	Team string `json:"team,omitempty"`
	Key  string `json:"key,omitempty"`
	// Damage says why it can't be read.
	Damage string `json:"damage,omitempty"`
}

// Snapshots lists all of them, by name.
func (s *Service) Snapshots(ctx context.Context) ([]Snapshot, error) {
	all, err := s.store.List()
	if err != nil {
		return nil, err
	}
	whose, err := s.owners(ctx)
	if err != nil {
		return nil, err
	}
	list := []Snapshot{}
	for _, info := range all {
		d, err := s.describe(info, whose)
		if err != nil {
			return nil, err
		}
		list = append(list, d)
	}
	return list, nil
}

// Snapshot tells of one.
func (s *Service) Snapshot(ctx context.Context, name string) (Snapshot, error) {
	info, err := s.store.Inspect(name)
	if err != nil {
		return Snapshot{}, err
	}
	whose, err := s.owners(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	return s.describe(info, whose)
}

// DeleteSnapshot deletes one, which nobody finds any more then, and tells who still uses it: its space is free when they have
// ended. One that somebody will need for what he has begun stays.
func (s *Service) DeleteSnapshot(ctx context.Context, name string) (usedBy []string, err error) {
	defer func() { s.ops.tell(audit.Entry{Action: audit.Delete, By: audit.Of(ctx), Snapshot: name}, err) }()
	info, err := s.store.Inspect(name)
	if errdefs.IsNotFound(err) || errdefs.IsInvalidArgument(err) {
		return nil, err
	}
	if err == nil { // what can't be read serves no purpose
		if err := s.needed(info); err != nil {
			return nil, err
		}
	}
	users, err := s.store.Delete(name)
	return names(users), err
}

// needed says why a snapshot can't go.
func (s *Service) needed(info snapshot.Info) error {
	p, err := saved.Decode(info.Note)
	if err != nil {
		return nil
	}
	refuse := func(format string, args ...any) error {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
	}
	switch p.Purpose {
	case saved.ForClone:
		if sandbox.Cloning(s.cfg, info.ID) {
			return refuse("clones of %s are being made of snapshot %s, which goes when they are", p.ID, info.ID)
		}
	case saved.ForPause:
		for _, c := range p.Containers {
			if k, err := saved.PausedOf(s.cfg, p.Namespace, c.ID).Checkpoint(); err == nil && k.Snapshot == info.ID {
				return refuse("container %s, which is paused, goes on from snapshot %s: `cube resume %[1]s` or `cube rm %[1]s`", c.ID, info.ID)
			}
		}
	}
	return nil
}

func (s *Service) describe(info snapshot.Info, whose owners) (d Snapshot, err error) {
	users, err := s.store.Users(info.ID)
	if err != nil {
		return d, err
	}
	d = Snapshot{
		Name: info.ID, Created: info.Created, Parent: info.Parent, VCPUs: info.Shape.VCPUs, Memory: int64(info.Shape.MemoryMiB) << 20,
		QEMU: info.Platform.QEMU, Guest: info.Platform.Guest, AtRest: info.Frozen, UsedBy: names(users), Damage: info.Damage,
	}
	d.Team, d.Key = whose.of(info.ID, "")
	if info.Damage != "" {
		return d, nil
	}
	pod, err := saved.Decode(info.Note)
	if err != nil {
		d.Damage = err.Error()
		return d, nil
	}
	d.Pod, d.Purpose = pod.ID, pod.Purpose
	d.Team, d.Key = whose.of(info.ID, pod.ID)
	for _, c := range pod.Containers {
		d.Containers = append(d.Containers, c.ID)
	}
	return d, nil
}

func names(users []snapshot.User) (list []string) {
	for _, u := range users {
		list = append(list, u.Name)
	}
	return list
}
