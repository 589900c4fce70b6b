// Package record is what a shim leaves in its bundle beside containerd's own files, so that whoever comes after a
// kill -9 can end what is left: `shim delete` reads it and undoes it.
//
//	shim.pid          the server process; it holds a lock on this file as long as it lives
//	address           the socket it listens on
//	cube/state.json   what it has acquired outside its bundle (State)
//	cube/exit.json    how the container ended (Exit)
//
// Files are replaced by rename. They needn't survive the host: neither does what they tell of.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// State is what a shim has acquired outside its bundle. It is written before the first such thing exists.
type State struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	// MachineDir is the directory of the machine; the vmm packages know how to undo all that it stands for.
	MachineDir string `json:"machineDir"`
	// ConfigFile is the configuration that the machine was made with, "" for the default one.
	ConfigFile string `json:"configFile,omitempty"`
	// PID is the machine's process, which is the task's pid. 0 while it isn't known.
	PID int `json:"pid,omitempty"`
	// Poststop are the hooks that are due when the container is removed.
	Poststop []specs.Hook `json:"poststop,omitempty"`
	// Created is false until the container existed: only then are its poststop hooks due.
	Created bool `json:"created,omitempty"`
	// Undone says that nothing of all this is left.
	Undone bool `json:"undone,omitempty"`
}

// Exit is how a container's first process ended.
type Exit struct {
	PID    int       `json:"pid"`
	Status uint32    `json:"status"`
	At     time.Time `json:"at"`
}

// Dir is a bundle's records.
type Dir string

func (d Dir) path(name string) string { return filepath.Join(string(d), "cube", name) }

// SaveState replaces the state.
func (d Dir) SaveState(s State) error { return d.save("state.json", s) }

// State reads the state; the error is fs.ErrNotExist where none was ever saved.
func (d Dir) State() (s State, err error) { return s, d.load("state.json", &s) }

// SaveExit replaces the exit.
func (d Dir) SaveExit(e Exit) error { return d.save("exit.json", e) }

// Exit reads the exit; the error is fs.ErrNotExist while the container hasn't ended.
func (d Dir) Exit() (e Exit, err error) { return e, d.load("exit.json", &e) }

func (d Dir) save(name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	path := d.path(name)
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("record %s: %w", name, err)
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return fmt.Errorf("record %s: %w", name, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("record %s: %w", name, err)
	}
	return nil
}

func (d Dir) load(name string, v any) error {
	b, err := os.ReadFile(d.path(name))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read %s: %w", d.path(name), err)
	}
	return nil
}
