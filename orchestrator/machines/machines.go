// Package machines makes the machines of sandboxes: each is a container of containerd's with a label, made from a snapshot of
// one, and has a place in the network. It is what package lifecycle has of containerd.
package machines

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Label is containerd's label with the team of a sandbox: the one that it was made for, or "(pool)" if that wasn't known then.
const Label = "io.cube.sandbox-team"

// Machines are those of this host. All methods may be called from many goroutines.
type Machines struct {
	cfg     *config.Config
	client  *sandbox.Client
	network *network.Network
	store   *snapshot.Store
}

var _ lifecycle.Machines = (*Machines)(nil)

// New makes machines by a client that stays open as long as they are used.
func New(cfg *config.Config, c *sandbox.Client, log *slog.Logger) *Machines {
	return &Machines{cfg: cfg, client: c, network: network.New(cfg), store: snapshot.New(cfg, log)}
}

// Create makes a running machine from a snapshot.
func (m *Machines) Create(ctx context.Context, want lifecycle.Machine) (netip.Addr, error) {
	if err := m.client.Await(ctx); err != nil {
		return netip.Addr{}, err
	}
	var b sandbox.Blueprint
	if err := json.Unmarshal(want.Container, &b); err != nil {
		return netip.Addr{}, fmt.Errorf("the template's container: %w", err)
	}
	settings, err := Settings(want.Network)
	if err != nil {
		return netip.Addr{}, err
	}
	err = m.client.Restore(ctx, sandbox.Restored{ID: want.ID, Snapshot: want.Snapshot, Blueprint: b, Network: settings, Labels: map[string]string{Label: want.Team}})
	if err != nil {
		return netip.Addr{}, err
	}
	return m.address(ctx, want.ID)
}

// address is where a running machine is reached.
func (m *Machines) address(ctx context.Context, id string) (netip.Addr, error) {
	a, err := m.network.Find(ctx, m.cfg.Containerd.Namespace, id)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("where sandbox %s is reached: %w", id, err)
	}
	return a.Address, nil
}

// Pause saves a machine to disk and ends it; without memory only its disk, when all is written there.
func (m *Machines) Pause(ctx context.Context, id string, memory bool) error {
	if err := m.client.Await(ctx); err != nil {
		return err
	}
	if memory {
		return m.client.Pause(ctx, id)
	}
	return m.client.PauseCold(ctx, id)
}

// Resume has a paused machine go on, or without memory begin anew with its disk.
func (m *Machines) Resume(ctx context.Context, id string, memory bool) (addr netip.Addr, note string, err error) {
	if err := m.client.Await(ctx); err != nil {
		return netip.Addr{}, "", err
	}
	if memory {
		note, err = m.client.Resume(ctx, id)
	} else {
		err = m.client.ResumeCold(ctx, id)
	}
	if err == nil {
		addr, err = m.address(ctx, id)
	}
	return addr, note, err
}

// Save makes a snapshot of a running machine.
func (m *Machines) Save(ctx context.Context, id, name string) error {
	if err := m.client.Await(ctx); err != nil {
		return err
	}
	_, err := m.client.Save(ctx, id, name)
	return err
}

// Rollback puts a running machine back to a snapshot of itself.
func (m *Machines) Rollback(ctx context.Context, id, name string) error {
	if err := m.client.Await(ctx); err != nil {
		return err
	}
	return m.client.Rollback(ctx, id, name)
}

// Hold has a running machine stand still.
func (m *Machines) Hold(ctx context.Context, id string) error { return m.client.Hold(ctx, id) }

// Release has it go on. containerd needn't be there for that.
func (m *Machines) Release(ctx context.Context, id string) error { return m.client.Release(ctx, id) }

// Forget deletes a snapshot, if there is one.
func (m *Machines) Forget(_ context.Context, name string) error {
	_, err := m.store.Delete(name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Sweep removes snapshots that are half made and that nobody makes any more.
func (m *Machines) Sweep(context.Context) error { return m.store.Sweep() }

// Kill removes a machine, whatever state it is in, if there is one.
func (m *Machines) Kill(ctx context.Context, id string) error {
	if err := m.client.Await(ctx); err != nil {
		return err
	}
	err := m.client.Remove(ctx, id, true)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Look tells what has become of a machine.
func (m *Machines) Look(ctx context.Context, id string) (lifecycle.Seen, error) {
	if err := m.client.Await(ctx); err != nil {
		return lifecycle.Seen{}, err
	}
	c, err := m.client.Get(ctx, id)
	if errdefs.IsNotFound(err) {
		return lifecycle.Seen{}, nil
	}
	if err != nil {
		return lifecycle.Seen{}, err
	}
	return m.seen(ctx, c)
}

// All tells it of all of them.
func (m *Machines) All(ctx context.Context) (map[string]lifecycle.Seen, error) {
	if err := m.client.Await(ctx); err != nil {
		return nil, err
	}
	list, err := m.client.List(ctx, true)
	if err != nil {
		return nil, err
	}
	all := map[string]lifecycle.Seen{}
	for _, c := range list {
		if c.Labels[Label] == "" {
			continue
		}
		if all[c.ID], err = m.seen(ctx, c); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (m *Machines) seen(ctx context.Context, c sandbox.Container) (lifecycle.Seen, error) {
	switch {
	case c.PausedAt != nil:
		return lifecycle.Seen{State: lifecycle.Still}, nil
	case c.ExitStatus != nil:
		return lifecycle.Seen{Why: fmt.Sprintf("its first process has ended with status %d, or its machine has", *c.ExitStatus)}, nil
	case c.Status == "running" || c.Status == "paused" || c.Status == "pausing": // the latter two by containerd's own pause
		addr, err := m.address(ctx, c.ID)
		if errdefs.IsNotFound(err) { // it is being ended
			return lifecycle.Seen{Why: "it has no place in the network"}, nil
		}
		return lifecycle.Seen{State: lifecycle.Runs, Addr: addr}, err
	}
	return lifecycle.Seen{}, nil // nobody knows how that came
}

// Watch calls ended with each machine that begins or ends.
func (m *Machines) Watch(ctx context.Context, ready func(), ended func(id string)) error {
	return m.client.Watch(ctx, ready, ended)
}
