package artefact

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
)

// QEMUBinary is QEMU's path in its artefact directory.
const QEMUBinary = "usr/bin/qemu-system-x86_64"

// qemuFiles is all that Cube's machines need of Debian's packages besides shared libraries: the binary, the emulator
// (a plug-in in Debian's build), and the firmware of the microvm machine and of its fallback with a PCI bus.
var qemuFiles = []string{
	QEMUBinary,
	"usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
	"usr/share/qemu/qboot.rom",
	"usr/share/qemu/linuxboot_dma.bin",
	"usr/share/qemu/pvh.bin",
	"usr/share/qemu/kvmvapic.bin",
	"usr/share/seabios/bios-microvm.bin",
	"usr/share/seabios/bios-256k.bin",
}

// mountPoints are directories that a jail around QEMU mounts over.
var mountPoints = []string{"dev", "proc", "run", "sys", "tmp"}

// Manifest says what an artefact was made of. It is manifest.json in the artefact directory.
type Manifest struct {
	// Kernel is the guest kernel's release; empty for QEMU.
	Kernel string `json:"kernel,omitempty"`
	// Packages maps the names of the Debian packages to their versions.
	Packages map[string]string `json:"packages"`
	// Files maps paths in the directory to the SHA-256 of their content, in hex.
	Files map[string]string `json:"files"`
	// Agent is the SHA-256 of the guest agent in the initramfs; empty for QEMU.
	Agent string `json:"agent,omitempty"`
}

// ManifestFile is the manifest's name in an artefact directory.
const ManifestFile = "manifest.json"

// ReadManifest reads the manifest of an artefact directory.
func ReadManifest(dir string) (*Manifest, error) {
	b, err := os.ReadFile(filepath.Join(dir, ManifestFile))
	if err != nil {
		return nil, err
	}
	m := new(Manifest)
	return m, json.Unmarshal(b, m)
}

// Write adds the digests of the directory's files and writes the manifest into it.
func (m *Manifest) Write(dir string) error {
	m.Files = map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		m.Files[rel], err = FileDigest(path)
		return err
	})
	if err != nil {
		return err
	}
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, ManifestFile), append(b, '\n'), 0o644)
}

// QEMU publishes a QEMU artefact below parent: a directory that QEMU can have as its root.
func QEMU(parent string, packages Sysroot, versions map[string]string) (string, error) {
	t := Tree{}
	if err := packages.Add(t, qemuFiles...); err != nil {
		return "", err
	}
	for _, dir := range mountPoints {
		t.Dir(dir, 0o755)
	}
	return Publish(parent, func(dir string) error {
		if err := t.Write(dir); err != nil {
			return err
		}
		m := Manifest{Packages: versions}
		return m.Write(dir)
	})
}
