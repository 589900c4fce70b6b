// Package guestimage packs what a machine boots: a kernel, an initramfs with the agent, crun and the modules that
// booting takes, and an image of the modules that workloads may ask for. The same input gives the same bytes.
package guestimage

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cubesandbox/cube/vmm/artefact"
)

// Names of the files in a guest artefact, besides artefact.ManifestFile.
const (
	Kernel    = "vmlinuz"
	Initramfs = "initrd.img"
	Modules   = "modules.img"
)

// Input is what a guest image is made of.
type Input struct {
	// Release is the kernel's release, as in "6.1.0-57-amd64".
	Release string
	// Kernel holds the unpacked kernel package, or what is laid out like one, after depmod.
	Kernel artefact.Sysroot
	// Crun holds the unpacked packages of crun and its libraries.
	Crun artefact.Sysroot
	// Agent is the agent's binary, which must be static.
	Agent string
	// Envd is cube-envd's binary, which must be static: containers get to see it.
	Envd string
	// Packages are the versions of the Debian packages.
	Packages map[string]string
}

// Publish makes the guest artefact below parent and returns its directory.
func Publish(parent string, in Input) (string, error) {
	s, err := readModules(filepath.Join(string(in.Kernel), "lib/modules", in.Release))
	if err != nil {
		return "", err
	}
	if err := errors.Join(checkStatic("agent", in.Agent), checkStatic("daemon for containers", in.Envd)); err != nil {
		return "", err
	}
	root, err := initramfs(in, s)
	if err != nil {
		return "", fmt.Errorf("initramfs: %w", err)
	}
	return artefact.Publish(parent, func(dir string) error {
		t := artefact.Tree{}
		t.Add(Kernel, artefact.Node{Mode: 0o644, Source: filepath.Join(string(in.Kernel), "boot/vmlinuz-"+in.Release)})
		if err := t.Write(dir); err != nil {
			return err
		}
		if err := writeInitramfs(filepath.Join(dir, Initramfs), root); err != nil {
			return fmt.Errorf("initramfs: %w", err)
		}
		if err := writeModulesImage(filepath.Join(dir, Modules), s, in.Envd); err != nil {
			return fmt.Errorf("modules image: %w", err)
		}
		agent, err := artefact.FileDigest(in.Agent)
		if err != nil {
			return err
		}
		m := artefact.Manifest{Kernel: in.Release, Packages: in.Packages, Agent: agent}
		return m.Write(dir)
	})
}

// checkStatic refuses a program that couldn't be started in the guest, or in a container of any image.
func checkStatic(what, file string) error {
	t := artefact.Tree{}
	err := artefact.Sysroot(filepath.Dir(file)).Add(t, filepath.Base(file))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the %s is missing: %w", what, err)
	case err != nil || len(t) != 1:
		return fmt.Errorf("the %s %s needs shared libraries; build it with CGO_ENABLED=0", what, file)
	}
	return nil
}
