package machines

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/teams"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/saved"
)

// diskPrefix is before the name of a directory of disks where machines are told of.
const diskPrefix = "disks/"

// Asset is what containerd and the store have for teams: containers that say so, and the disks of their machines.
func (m *Machines) Asset() teams.Asset {
	return teams.Asset{
		Kind: "machine",
		List: m.owned,
		Remove: func(ctx context.Context, team string) error {
			names, err := m.owned(ctx, team)
			errs := []error{err}
			for _, name := range names {
				if !strings.HasPrefix(name, diskPrefix) {
					errs = append(errs, m.Kill(ctx, name))
				}
			}
			return errors.Join(errs...)
		},
		Left: func(ctx context.Context, names []string) ([]string, error) {
			var ids, left []string
			for _, name := range names {
				disks, ok := strings.CutPrefix(name, diskPrefix)
				if !ok {
					ids = append(ids, name)
				} else if there(filepath.Join(m.cfg.DiskDir(), disks)) {
					left = append(left, name)
				}
			}
			more, err := m.Left(ctx, ids)
			return append(left, more...), err
		},
	}
}

// Images are those that were pulled for teams alone.
func (m *Machines) Images() teams.Asset {
	return teams.Asset{Kind: "image", List: func(ctx context.Context, team string) ([]string, error) {
		if err := m.client.Await(ctx); err != nil {
			return nil, err
		}
		return m.client.OwnImages(ctx, team)
	}, Remove: m.client.Disown}
}

// owned names a team's containers, and the disks that their pods have.
func (m *Machines) owned(ctx context.Context, team string) (names []string, err error) {
	if err := m.client.Await(ctx); err != nil {
		return nil, err
	}
	all, err := m.client.List(ctx, true)
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if c.Labels[Label] == team {
			names = append(names, c.ID)
		}
	}
	states, err := m.pods()
	for _, s := range states {
		if !slices.Contains(names, s.ID) {
			continue
		}
		for _, dir := range []string{s.DiskDir, otherDisks(s)} {
			if dir != "" {
				names = append(names, diskPrefix+filepath.Base(dir))
			}
		}
	}
	return names, err
}

func otherDisks(s record.PodState) string {
	if s.Other == nil {
		return ""
	}
	return s.Other.DiskDir
}

// pods are the states of all pods in the namespace of sandboxes.
func (m *Machines) pods() (states []record.PodState, err error) {
	all, err := record.Pods(m.cfg.PodDir())
	if err != nil {
		return nil, err
	}
	for _, pod := range all {
		s, err := pod.State()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("the state of pod %s: %w", filepath.Base(string(pod)), err)
		}
		if s.Namespace == m.cfg.Containerd.Namespace {
			states = append(states, s)
		}
	}
	return states, nil
}

// Left tells of which sandboxes there is anything on this host: a container, a pod, a log, what it was paused with, or a machine's
// snapshot that was made of it.
func (m *Machines) Left(ctx context.Context, ids []string) (left []string, err error) {
	if len(ids) == 0 {
		return nil, nil
	}
	if err := m.client.Await(ctx); err != nil {
		return nil, err
	}
	some := map[string]bool{}
	states, err := m.pods()
	if err != nil {
		return nil, err
	}
	for _, s := range states {
		some[s.ID] = true
	}
	snapshots, err := m.store.List()
	if err != nil {
		return nil, err
	}
	for _, info := range snapshots {
		if p, err := saved.Decode(info.Note); err == nil { // what can't be read is of nobody
			some[p.ID] = true
		}
	}
	for _, id := range ids {
		logs, err := filepath.Glob(sandbox.LogPath(m.cfg, id) + "*")
		if err != nil {
			return nil, err
		}
		_, err = m.client.Get(ctx, id)
		if err != nil && !errdefs.IsNotFound(err) {
			return nil, err
		}
		if err == nil || some[id] || len(logs) > 0 || there(filepath.Join(m.cfg.PausedDir(), m.cfg.Containerd.Namespace, id)) {
			left = append(left, id)
		}
	}
	return left, nil
}

// LeftSnapshots tells which snapshots of machines are still in the store.
func (m *Machines) LeftSnapshots(_ context.Context, names []string) (left []string, err error) {
	for _, name := range names {
		if there(filepath.Join(m.cfg.SnapshotDir(), name)) {
			left = append(left, name)
		}
	}
	return left, nil
}

func there(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
