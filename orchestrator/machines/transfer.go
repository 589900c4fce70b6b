package machines

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Hosts are where a registry is asked for what somebody names, who reaches nothing by that which he otherwise wouldn't; see
// sandbox.Fetch.
func (m *Machines) Hosts(ctx context.Context, name, user, secret string) docker.RegistryHosts {
	return sandbox.PullOptions{User: user, Secret: secret, Outside: true}.Hosts(ctx, name)
}

// Export opens a machine's snapshot for it to be carried elsewhere, until done is called.
func (m *Machines) Export(_ context.Context, name string) (what registry.Machine, read registry.Read, done func() error, err error) {
	s, err := m.store.Open(name, "push")
	if err != nil {
		return what, nil, nil, err
	}
	p, err := saved.Decode(s.Note)
	if err == nil && (len(p.Containers) != 1 || len(p.Containers[0].Processes) != 1 || len(p.Ended) > 0 || p.Containers[0].Paused ||
		!slices.Equal(p.Containers[0].Disks, []string{vmm.RootSerial})) {
		err = errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("snapshot %s isn't of one container with one process and one disk", name))
	}
	if err != nil {
		_ = s.Close() // it was only read
		return what, nil, nil, err
	}
	c := p.Containers[0]
	return registry.Machine{Snapshot: s.Info.Foreign(), Guest: c.Guest, Process: c.Processes[0], Event: p.Event}, s.ReadChunk, s.Close, nil
}

// Import makes a machine's snapshot of what has come from elsewhere, or without memory of its disk alone. Of what isn't the machine's
// own nothing is taken over: what the snapshot says of its container is written here.
func (m *Machines) Import(_ context.Context, name string, of registry.Machine, memory bool, fill func(*snapshot.Info, snapshot.Put) error) error {
	info := of.Snapshot
	if !memory {
		info = info.WithoutMemory()
	}
	pod := saved.Pod{ID: name, Namespace: m.cfg.Containerd.Namespace, Event: of.Event, Containers: []saved.Container{{
		ID: name, Guest: of.Guest, Disks: []string{vmm.RootSerial}, Processes: []saved.Process{of.Process},
	}}}
	var err error
	if info.Note, err = pod.Encode(); err != nil {
		return err
	}
	return m.store.Import(name, info, func(put snapshot.Put) error { return fill(&info, put) })
}

// Blueprint is what lifecycle.Machine has to say of snapshots of a machine that would begin so, with a disk that is no image's, but whose
// disk and memory come from elsewhere.
func (m *Machines) Blueprint(ctx context.Context, b lifecycle.Beginning) (json.RawMessage, error) {
	if err := m.client.Await(ctx); err != nil {
		return nil, err
	}
	b.Image = sandbox.Blank
	s, err := specOf(b)
	if err != nil {
		return nil, err
	}
	draft, err := m.client.Draft(ctx, s)
	if err != nil {
		return nil, err
	}
	return json.Marshal(draft)
}
