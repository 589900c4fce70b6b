package base

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/qemu"
)

// formatVersion changes with what a snapshot directory holds.
const formatVersion = 2

// Key is all that must be equal for a saved machine to be restored. The rate of the time stamp counter, which may differ
// a little, is in the snapshot's description.
type Key struct {
	Format int `json:"format"`
	// Board is qemu.BoardVersion: machine type and device list.
	Board int `json:"board"`
	// QEMU and Guest (kernel, initramfs, modules) are the digests by which the artefact directories are named.
	QEMU  string     `json:"qemu"`
	Guest string     `json:"guest"`
	Accel accel.Kind `json:"accel"`
	CPU   string     `json:"cpu"`
	Shape vmm.Shape  `json:"shape"`
}

// artefacts are the directories behind the names "current", which set-up may point elsewhere at any time.
type artefacts struct{ qemu, guest string }

func currentArtefacts(cfg *config.Config) (a artefacts, err error) {
	if a.qemu, err = filepath.EvalSymlinks(cfg.QEMUDir()); err != nil {
		return a, fmt.Errorf("QEMU is not installed: %w; run the set-up (make run)", err)
	}
	if a.guest, err = filepath.EvalSymlinks(cfg.GuestDir()); err != nil {
		return a, fmt.Errorf("the guest image is not installed: %w; run the set-up (make run)", err)
	}
	return a, nil
}

// use keeps the artefacts from being removed until release is called. fs.ErrNotExist: they have been.
func (a artefacts) use(ctx context.Context) (release func() error, err error) {
	qemu, err := artefact.Use(ctx, a.qemu)
	if err != nil {
		return nil, err
	}
	guest, err := artefact.Use(ctx, a.guest)
	if err != nil {
		qemu()
		return nil, err
	}
	return func() error { qemu(); guest(); return nil }, nil
}

// useCurrent is currentArtefacts, kept from being removed.
func useCurrent(ctx context.Context, cfg *config.Config) (a artefacts, release func() error, err error) {
	for {
		if a, err = currentArtefacts(cfg); err != nil {
			return a, nil, err
		}
		release, err = a.use(ctx)
		if !errors.Is(err, fs.ErrNotExist) {
			return a, release, err
		}
		// Others have become the current ones meanwhile, and these were removed.
		if now, e := currentArtefacts(cfg); e != nil || now == a {
			return a, nil, errors.Join(err, e)
		}
	}
}

// newKey describes a machine of that shape and of these artefacts on this host.
func newKey(art artefacts, a accel.Kind, shape vmm.Shape) (Key, error) {
	k := Key{
		Format: formatVersion,
		Board:  qemu.BoardVersion,
		QEMU:   filepath.Base(art.qemu),
		Guest:  filepath.Base(art.guest),
		Accel:  a,
		Shape:  shape,
	}
	var err error
	k.CPU, err = cpuOf(a)
	return k, err
}

// cpuOf is the CPU that a guest gets on this host: an emulated one is the same everywhere, a real one has the host's
// features.
func cpuOf(a accel.Kind) (string, error) {
	model := qemu.CPUModel(a)
	if a != accel.KVM {
		return model, nil
	}
	cpu, err := hostCPU("/proc/cpuinfo")
	return model + ":" + cpu, err
}

// hostCPU is a digest of the first CPU's model and features.
func hostCPU(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	for s := bufio.NewScanner(f); s.Scan() && s.Text() != ""; { // an empty line ends the first CPU
		key, _, _ := strings.Cut(s.Text(), ":")
		switch strings.TrimSpace(key) {
		case "vendor_id", "cpu family", "model", "stepping", "microcode", "flags":
			fmt.Fprintln(h, s.Text())
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// ID is the name of the snapshot's directory.
func (k Key) ID() string {
	b, err := json.Marshal(k)
	if err != nil {
		panic(err) // strings and numbers only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}
