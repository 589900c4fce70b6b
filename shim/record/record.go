// Package record is what a shim leaves on the host, so that whoever comes after a kill -9 can end what is left: `shim
// delete` reads it and undoes it. There are two places. A pod has a directory of its own below the run directory:
//
//	shim.pid          the server process; it holds a lock on this file as long as it lives
//	address           the socket it listens on
//	state.json        what it has acquired for all its containers (PodState)
//	members/<id>      a link to the bundle of each container
//	config/<id>.toml  the configuration that came with the request for a container, if one did
//
// And each container has in its bundle, beside containerd's own files:
//
//	cube/pod          a link to the pod's directory
//	cube/state.json   what was acquired for this container (State)
//	cube/exit.json    how the container ended (Exit)
//
// Nothing of a pod is in a bundle: the container that came first may be deleted before the others. Files are replaced by
// rename. They needn't survive the host: neither does what they tell of.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// save replaces a file by the value in JSON.
func save(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return replace(path, b)
}

// replace replaces a file, in a directory that is made if need be.
func replace(path string, content []byte) error {
	if err := mkdir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	return nil
}

// link makes path a symbolic link to target, whatever it was.
func link(target, path string) error {
	if err := mkdir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	if old, err := os.Readlink(path); err == nil && old == target {
		return nil
	}
	if err := remove(path); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	if err := os.Symlink(target, path); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	return nil
}

func mkdir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

func remove(path string) error {
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func load(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
