package record

import (
	"os"
	"path/filepath"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/shim/share"
)

// Bundle is the directory that containerd has made for a container, with the container's records.
type Bundle string

// State is what was acquired for one container. It is written before the first such thing exists.
type State struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	// PID is the machine's process, which is the task's pid. 0 while it isn't known.
	PID int `json:"pid,omitempty"`
	// ConfigFile is the configuration that the container was made with, "" for the default one.
	ConfigFile string `json:"configFile,omitempty"`
	// Share is what the helper process for shared files holds.
	Share share.Record `json:"share,omitzero"`
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

func (b Bundle) path(name string) string { return filepath.Join(string(b), "cube", name) }

// SaveState replaces the state.
func (b Bundle) SaveState(s State) error { return save(b.path("state.json"), s) }

// State reads the state; the error is fs.ErrNotExist where none was ever saved.
func (b Bundle) State() (s State, err error) { return s, load(b.path("state.json"), &s) }

// SaveExit replaces the exit.
func (b Bundle) SaveExit(e Exit) error { return save(b.path("exit.json"), e) }

// Exit reads the exit; the error is fs.ErrNotExist while the container hasn't ended.
func (b Bundle) Exit() (e Exit, err error) { return e, load(b.path("exit.json"), &e) }

// Pod is the pod that the container belongs to; the error is fs.ErrNotExist where none has been joined.
func (b Bundle) Pod() (Pod, error) {
	dir, err := os.Readlink(b.path("pod"))
	return Pod(dir), err
}
