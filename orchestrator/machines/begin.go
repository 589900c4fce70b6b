package machines

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/spec"
)

// Begin makes a running machine, and returns where it is reached and what lifecycle.Machine has to say of snapshots of it.
func (m *Machines) Begin(ctx context.Context, b lifecycle.Beginning) (addr netip.Addr, container json.RawMessage, err error) {
	if err := m.client.Await(ctx); err != nil {
		return addr, nil, err
	}
	s, err := specOf(b)
	if err != nil {
		return addr, nil, err
	}
	_, err = m.client.RunDetached(ctx, s, nil)
	if err != nil {
		return addr, nil, err
	}
	blueprint, err := m.client.Blueprint(ctx, b.ID)
	if err != nil {
		return addr, nil, err
	}
	if container, err = json.Marshal(blueprint); err != nil {
		return addr, nil, err
	}
	seen, err := m.Look(ctx, b.ID)
	if err == nil && seen.State != lifecycle.Runs {
		err = errdefs.ErrFailedPrecondition.WithMessage("its machine has ended: " + seen.Why)
	}
	return seen.Addr, container, err
}

// specOf is the container of a machine that begins so.
func specOf(b lifecycle.Beginning) (sandbox.Spec, error) {
	settings, err := Settings(b.Network)
	entry := sandbox.Envd
	return sandbox.Spec{
		ID: b.ID, Image: b.Image, Outside: true, From: b.Disk, Entrypoint: &entry,
		Process: sandbox.Process{Args: b.Args, Env: b.Env, User: "root", Cwd: "/"},
		Disk:    int64(b.DiskMB) << 20,
		Annotations: map[string]string{
			spec.VCPUs: strconv.Itoa(b.CPUs), spec.Memory: strconv.Itoa(b.MemoryMB) + "MiB",
		},
		Labels: map[string]string{Label: b.Team}, Whole: true, Network: settings,
	}, err
}

// Fetch has an image be here.
func (m *Machines) Fetch(ctx context.Context, f sandbox.Fetch) (sandbox.Fetched, error) {
	if err := m.client.Await(ctx); err != nil {
		return sandbox.Fetched{}, err
	}
	return m.client.Fetch(ctx, f)
}

// Has tells whether there is a snapshot of that name.
func (m *Machines) Has(_ context.Context, snapshot string) (bool, error) {
	_, err := m.store.Inspect(snapshot)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// SaveDisk makes a snapshot of a running machine's disk alone, which goes on, and tells how many bytes are on that disk and not on
// the one of the snapshot before, "" for none.
func (m *Machines) SaveDisk(ctx context.Context, id, name, before string) (bytes int64, err error) {
	if err := m.client.Await(ctx); err != nil {
		return 0, err
	}
	if err := m.client.SaveDisks(ctx, id, name, before); err != nil {
		return 0, err
	}
	if bytes, err = m.store.Added(name, before); err != nil {
		return 0, fmt.Errorf("measure snapshot %s: %w", name, err)
	}
	return bytes, nil
}
