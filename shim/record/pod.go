package record

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cubesandbox/cube/internal/flock"
)

// Pod is a pod's directory.
type Pod string

// PodState is what a shim has acquired for all containers of its pod. It is written before the first such thing exists.
type PodState struct {
	// ID is the pod's: the group that its containers name, or the id of the only one.
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	// MachineDir is the directory of the machine; the vmm packages know how to undo all that it stands for.
	MachineDir string `json:"machineDir,omitempty"`
	// DiskDir is the directory with the disks of a machine that was made from a snapshot, "" for one that wasn't.
	DiskDir string `json:"diskDir,omitempty"`
	// Other is a second machine, while a rollback puts one in the place of the other.
	Other *Other `json:"other,omitempty"`
	// ConfigFile is the configuration that the machine was made with, or that one of the pod's own is to be made with; ""
	// for the default one.
	ConfigFile string `json:"configFile,omitempty"`
	// PID is the machine's process, 0 while it isn't known.
	PID int `json:"pid,omitempty"`
	// Sandbox: the machine was made for the pod itself, and needs no container.
	Sandbox bool `json:"sandbox,omitempty"`
	// Undone says that nothing of the machine is left.
	Undone bool `json:"undone,omitempty"`
}

// Other is a machine beside the pod's own.
type Other struct {
	MachineDir string `json:"machineDir"`
	DiskDir    string `json:"diskDir,omitempty"`
}

// MachineDirs are the directories of all machines.
func (s PodState) MachineDirs() []string {
	var dirs []string
	if s.MachineDir != "" {
		dirs = append(dirs, s.MachineDir)
	}
	if s.Other != nil {
		dirs = append(dirs, s.Other.MachineDir)
	}
	return dirs
}

// RemoveDisks removes the disks of all machines, which are no more.
func (s PodState) RemoveDisks() error {
	dirs := []string{s.DiskDir}
	if s.Other != nil {
		dirs = append(dirs, s.Other.DiskDir)
	}
	var errs []error
	for _, dir := range dirs {
		if dir != "" {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the machine's disks: %w", err)
	}
	return nil
}

func (p Pod) path(name string) string { return filepath.Join(string(p), name) }

// Make makes the directory and takes its lock, as Lock does.
func (p Pod) Make(ctx context.Context) (unlock func(), err error) {
	for {
		err := os.MkdirAll(string(p), 0o700)
		if err == nil {
			if unlock, err = p.Lock(ctx); err == nil {
				return unlock, nil
			}
		}
		// Somebody may be removing the directory of an earlier pod, in the middle of either.
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) || ctx.Err() != nil {
			return nil, fmt.Errorf("make the pod's directory: %w", err)
		}
	}
}

// Lock keeps others from starting or ending a shim for this pod. The error is fs.ErrNotExist when the pod is gone, with
// all that it had.
func (p Pod) Lock(ctx context.Context) (unlock func(), err error) {
	unlock, err = flock.LockDir(ctx, string(p), false)
	if err != nil {
		return nil, fmt.Errorf("lock the pod: %w", err)
	}
	return unlock, nil
}

// Discard removes the directory if it tells of nothing that isn't undone. The caller has its lock and knows that no shim
// lives.
func (p Pod) Discard() error {
	ids, err := p.Members()
	if err != nil || len(ids) > 0 {
		return err
	}
	s, err := p.State()
	if err != nil && !errors.Is(err, fs.ErrNotExist) || s.MachineDir != "" && !s.Undone {
		return err
	}
	return os.RemoveAll(string(p))
}

// SaveState replaces the state.
func (p Pod) SaveState(s PodState) error { return save(p.path("state.json"), s) }

// State reads the state; the error is fs.ErrNotExist where none was ever saved.
func (p Pod) State() (s PodState, err error) { return s, load(p.path("state.json"), &s) }

// SaveAddress replaces the address that the shim listens on.
func (p Pod) SaveAddress(address string) error { return replace(p.path("address"), []byte(address)) }

// Address reads it.
func (p Pod) Address() (string, error) {
	b, err := os.ReadFile(p.path("address"))
	return string(b), err
}

// SaveConfig keeps a configuration that came with the request for a container, and returns the file's path. The machine
// may be of it, so it stays as long as the pod.
func (p Pod) SaveConfig(id string, toml []byte) (path string, err error) {
	path = filepath.Join(p.path("config"), id+".toml")
	return path, replace(path, toml)
}

// Join makes a container the pod's. Idempotent.
func (p Pod) Join(id string, b Bundle) error {
	if err := link(string(p), b.path("pod")); err != nil {
		return err
	}
	return link(string(b), p.member(id))
}

// Leave is the end of Join. The container goes on knowing which pod was its own.
func (p Pod) Leave(id string) error { return remove(p.member(id)) }

func (p Pod) member(id string) string { return filepath.Join(p.path("members"), id) }

// Members lists the containers that have something that isn't undone, or are about to: all who have joined, except those
// whose bundle is gone, is another pod's by now, or says that nothing is left.
func (p Pod) Members() ([]string, error) {
	entries, err := os.ReadDir(p.path("members"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the pod's containers: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if bundle, err := os.Readlink(p.member(e.Name())); err == nil && p.holds(Bundle(bundle)) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

func (p Pod) holds(b Bundle) bool {
	if own, err := b.Pod(); err != nil || own != p {
		return false
	}
	s, err := b.State()
	return err != nil || !s.Undone // one that can't be read may have anything
}

// Others is Members without one.
func (p Pod) Others(id string) ([]string, error) {
	ids, err := p.Members()
	return slices.DeleteFunc(ids, func(m string) bool { return m == id }), err
}
