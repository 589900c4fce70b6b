package registry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// configFormat changes with what a Config holds.
const configFormat = 1

// Config is what an artefact says of itself: the template, and the machine whose files are its layers.
type Config struct {
	Format  int       `json:"format"`
	Created time.Time `json:"created"` // when the template was built
	// Template is what sandboxes of it have. Container is no part of it: what a container may have of its host is the host's to say.
	Template Template `json:"template"`
	Machine  Machine  `json:"machine"`
}

// Template is a template as a host that has nothing of it has to know it.
type Template struct {
	// Settings lack Image and Container.
	db.Settings
	// ImageName is of the image that it was made of, "" if that isn't known.
	ImageName string `json:"imageName,omitempty"`
	// Env are the variables of its first process, KEY=VALUE.
	Env      []string `json:"env,omitempty"`
	CPUs     int      `json:"cpus"`
	MemoryMB int      `json:"memoryMB"`
}

// Machine is a saved one that has a single container with a root disk alone.
type Machine struct {
	// Snapshot has no name, no owner's note, and no parent.
	Snapshot snapshot.Info `json:"snapshot"`
	// Guest is the container's id in the guest, Process its first process, and Event the last of the agent's events that the guest has
	// told of.
	Guest   string        `json:"guest"`
	Process saved.Process `json:"process"`
	Event   uint64        `json:"event"`
}

// DiskMB is how large the disk is, in MiB.
func (m *Machine) DiskMB() int {
	for _, d := range m.Snapshot.Disks {
		return int((d.File.Size + memory.ChunkSize - 1) / memory.ChunkSize)
	}
	return 0
}

// Bounds of what is read of a Config beside what others check.
const (
	maxText = 512
	maxEnv  = 1 << 20 // bytes of all variables
)

var versionForm = regexp.MustCompile(`^[0-9]{1,4}(\.[0-9]{1,6}){2}$`)

// check tells what is wrong with a Config. Nothing in it is believed that could do harm. What its template runs, and as whom, is for
// whoever makes builds to check.
func (c *Config) check() error {
	m, t := &c.Machine, &c.Template
	if c.Format != configFormat {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("it has format %d, this cube reads %d", c.Format, configFormat))
	}
	if err := m.Snapshot.Check(); err != nil {
		return err
	}
	switch s := &m.Snapshot; {
	case s.ID != "" || s.Parent != "" || s.Note != nil:
		return damaged("its machine has a name, a parent or a note")
	case !s.Frozen:
		return damaged("its machine wasn't at rest when it was saved")
	case len(s.Disks) != 1 || s.Disks[0].Serial != vmm.RootSerial || s.Disks[0].ReadOnly || s.Disks[0].Placeholder:
		return damaged("its machine has other disks than a root")
	case identifiers.Validate(m.Guest) != nil:
		return damaged("its container is called %.100q", m.Guest)
	case m.Process.Terminal || m.Process.ExecID != "":
		return damaged("its first process is none of a template's")
	case t.CPUs < 1 || t.CPUs > s.Shape.VCPUs || s.Shape.VCPUs >= 2*t.CPUs && s.Shape.VCPUs > 1:
		return damaged("it has %d CPUs of %s", t.CPUs, s.Shape)
	// The launcher's ladder has powers of two, from 128 MiB on: a machine takes no more than twice of what is reserved for it.
	case t.MemoryMB < 1 || t.MemoryMB > s.Shape.MemoryMiB || s.Shape.MemoryMiB >= 2*t.MemoryMB && s.Shape.MemoryMiB > 128:
		return damaged("it has %d MiB of %s", t.MemoryMB, s.Shape)
	case t.Image != "" || t.Container != nil:
		return damaged("it brings a container")
	case t.EnvdVersion != "" && !versionForm.MatchString(t.EnvdVersion):
		return damaged("its envd has the version %.100q", t.EnvdVersion)
	}
	for _, s := range []string{t.ImageName, t.Digest, t.Builder, t.Inputs} {
		if len(s) > maxText || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
			return damaged("it has a name %.100q", s)
		}
	}
	sum := 0
	for _, v := range t.Env {
		name, _, ok := strings.Cut(v, "=")
		if !ok || name == "" || strings.ContainsRune(v, 0) {
			return damaged("%.100q is no variable", v)
		}
		sum += len(v)
	}
	if sum > maxEnv {
		return damaged("its variables have %d bytes", sum)
	}
	return nil
}

// decodeConfig is strict: what isn't known may matter.
func decodeConfig(b []byte) (*Config, error) {
	c := &Config{}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		return nil, damaged("it can't be read: %v", err)
	}
	return c, c.check()
}

// partChunks is how many chunks one layer has at most: those with the numbers from a multiple of it on.
const partChunks = 32

// part is what a layer has: chunks of a file, one behind the other. Those that are left out are zeros.
type part struct {
	file   string
	size   int64 // of the file
	chunks []int64
}

// bytes are how many there are of it, without compression.
func (p part) bytes() (n int64) {
	for _, c := range p.chunks {
		n += memory.ChunkLen(p.size, c)
	}
	return n
}

// parts are those of a snapshot's files, in the order of the layers.
func parts(i *snapshot.Info) (all []part) {
	for _, f := range i.Files() {
		numbers := make([]int64, 0, len(f.Digests))
		for n := range f.Digests {
			numbers = append(numbers, n)
		}
		slices.Sort(numbers)
		for len(numbers) > 0 {
			end, _ := slices.BinarySearch(numbers, (numbers[0]/partChunks+1)*partChunks)
			all = append(all, part{file: f.Name, size: f.Size, chunks: numbers[:end]})
			numbers = numbers[end:]
		}
	}
	return all
}

func damaged(format string, args ...any) error {
	return errdefs.ErrDataLoss.WithMessage("the artefact isn't one of a template as `cube template push` makes them: " + fmt.Sprintf(format, args...))
}
