// Package enter is the inside of the jail: what cube-jail does to itself between its start and its exec of the command,
// QEMU or cube-share. It imports next to nothing, since its start-up time is part of every machine's.
//
// It runs as root and gives that up step by step: control groups, namespaces, the file system, then uid, capabilities
// and the way back to them. Any step that fails ends it: there is no command with half a jail.
package enter

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	// maxSpec bounds the specification's size; a command line has a few KiB.
	maxSpec = 1 << 20
	// lastFileCap ends the capabilities that are about files and nothing else; no command keeps another one.
	lastFileCap = unix.CAP_FSETID
)

// Spec says what to become. The launching process writes it to cube-jail's standard input, as JSON.
type Spec struct {
	// Parent is the pid of the launching process, with which the jailed one dies.
	Parent int `json:"parent"`
	// Root is the directory that becomes the root, read-only. With Trees it is only the place where theirs is mounted.
	Root string `json:"root"`
	// Trees, if there are any, make up the root, together with proc.
	Trees []Tree `json:"trees"`
	// UID is the host uid and gid to run under.
	UID uint32 `json:"uid"`
	// Argv is the command; its first element is an absolute path below Root.
	Argv []string `json:"argv"`
	// Keep is the highest descriptor that the command inherits; it gets all from 0 on.
	Keep int `json:"keep"`
	// Cgroups are descriptors of the "tasks" files of the cgroup v1 groups to enter, above Keep; v2 needs none, since
	// there the process is born in its group.
	Cgroups []int `json:"cgroups"`
	// NetNS is a descriptor of the network namespace to enter, above Keep; 0 for a new, empty one.
	NetNS int `json:"netns"`
	// Tap is the descriptor, up to Keep, that a tap made in the network namespace gets; 0 for no tap.
	Tap int `json:"tap"`
	// KVM puts /dev/kvm into the jail.
	KVM bool `json:"kvm"`
	// Init: this is the first process of a pid namespace. Its parent has no pid there.
	Init bool `json:"init"`
	// Caps are the capabilities that the command keeps, up to CAP_FSETID.
	Caps []int `json:"caps"`
	// MaxFiles bounds its descriptors.
	MaxFiles uint64 `json:"maxFiles"`
}

// Tree is a detached mount, of a directory or a file (open_tree(2)).
type Tree struct {
	// FD is its descriptor, above Keep.
	FD int `json:"fd"`
	// Path is where it goes below the root, without a leading slash.
	Path string `json:"path"`
}

// Read takes a specification from r, up to its end, and checks it.
func Read(r io.Reader) (*Spec, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxSpec+1))
	if err != nil {
		return nil, fmt.Errorf("read the specification: %w", err)
	}
	if len(b) == 0 {
		return nil, errors.New("no specification came; cube-jail is started by cube, not by hand")
	}
	if len(b) > maxSpec {
		return nil, fmt.Errorf("the specification is larger than %d bytes", maxSpec)
	}
	var s Spec
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read the specification: %w", err)
	}
	return &s, s.valid()
}

func (s *Spec) valid() error {
	switch {
	case s.Parent <= 1:
		return fmt.Errorf("parent %d", s.Parent)
	case !filepath.IsAbs(s.Root) || filepath.Clean(s.Root) == "/":
		return fmt.Errorf("root %q", s.Root)
	case s.UID < 1000:
		return fmt.Errorf("uid %d is not an unprivileged one", s.UID)
	case len(s.Argv) == 0 || !filepath.IsAbs(s.Argv[0]):
		return fmt.Errorf("command %q", s.Argv)
	case s.Keep < 2 || s.Tap < 0 || s.Tap > s.Keep || s.Tap == 1 || s.Tap == 2:
		return fmt.Errorf("descriptors up to %d, tap %d", s.Keep, s.Tap)
	case s.NetNS != 0 && s.NetNS <= s.Keep:
		return fmt.Errorf("network namespace on descriptor %d", s.NetNS)
	case s.MaxFiles <= uint64(s.Keep):
		return fmt.Errorf("at most %d descriptors", s.MaxFiles)
	}
	for _, t := range s.Trees {
		if t.FD <= s.Keep || !filepath.IsLocal(t.Path) || t.Path != filepath.Clean(t.Path) || t.Path == "." {
			return fmt.Errorf("tree %q on descriptor %d", t.Path, t.FD)
		}
	}
	for _, c := range s.Caps {
		if c < 0 || c > lastFileCap {
			return fmt.Errorf("capability %d is not one to keep", c)
		}
	}
	for _, fd := range s.Cgroups {
		if fd <= s.Keep {
			return fmt.Errorf("cgroup on descriptor %d", fd)
		}
	}
	return nil
}
