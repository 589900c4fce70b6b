package spec

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/config"
)

// Sandbox decides on a machine that is made for a pod before there is any container, by the pod's annotations, what its
// containers may use in all, and the configuration.
func Sandbox(annotated map[string]string, r *specs.LinuxResources, cfg *config.Config) (Machine, error) {
	p := &Plan{Guest: &specs.Spec{Annotations: annotated, Linux: &specs.Linux{Resources: r}}}
	for _, step := range []step{annotations, size} {
		if err := step(p, cfg); err != nil {
			return Machine{}, err
		}
	}
	return p.Machine, nil
}

// Join makes the container a member of the pod, whether its annotations name one or not.
func Join(s *specs.Spec, pod string) {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	delete(s.Annotations, runcGroup)
	s.Annotations[sandboxID] = pod
}

// Common is what a pod gives each of its containers.
type Common struct {
	// Files are small files by their absolute path. A mount of the container's own wins.
	Files map[string][]byte
	// Sysctls are of namespaces that the containers have in common. The container's own win.
	Sysctls map[string]string
}

// Inherit gives the container what its pod has for it.
func (p *Plan) Inherit(c Common) error {
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		if err := p.provide(name, c.Files[name]); err != nil {
			return err
		}
	}
	if slices.Contains(p.Join, specs.IPCNamespace) {
		p.shareShm()
	}
	sysctls := maps.Clone(c.Sysctls)
	if sysctls == nil {
		return nil
	}
	maps.Copy(sysctls, p.Guest.Linux.Sysctl)
	p.Guest.Linux.Sysctl = sysctls
	return nil
}

func (p *Plan) provide(name string, content []byte) error {
	if slices.ContainsFunc(p.Guest.Mounts, func(m specs.Mount) bool { return path.Clean(m.Destination) == name }) {
		return nil
	}
	if len(p.Files) == maxFiles {
		return invalid("mount %s: a container can have at most %d such files", name, maxFiles)
	}
	p.Guest.Mounts = append(p.Guest.Mounts, specs.Mount{
		Destination: name, Type: fileMount, Source: strconv.Itoa(len(p.Files)), Options: []string{"nosuid", "nodev", "noexec"},
	})
	p.Files = append(p.Files, File{Content: content, Mode: 0o644})
	return nil
}

// shareShm makes a /dev/shm of the container's own the pod's: memory is shared by name there, and with the ipc namespace
// by number.
func (p *Plan) shareShm() {
	for i, m := range p.Guest.Mounts {
		if path.Clean(m.Destination) != "/dev/shm" || m.Type != "tmpfs" {
			continue
		}
		made := specs.Mount{Destination: m.Destination, Type: shmMount, Source: "shm"}
		size := int64(defaultShm)
		for _, o := range m.Options {
			if n, ok := tmpfsSize(o); ok {
				size = n
			} else if slices.Contains(perMount, o) {
				made.Options = append(made.Options, o)
			}
		}
		made.Options = append(made.Options, fmt.Sprintf("size=%d", size))
		p.Guest.Mounts[i] = made
	}
}

// tmpfsSize reads a tmpfs's option size=, in bytes or with a letter for the unit.
func tmpfsSize(option string) (int64, bool) {
	v, ok := strings.CutPrefix(option, "size=")
	if !ok {
		return 0, false
	}
	n, err := units.RAMInBytes(v)
	return n, err == nil && n > 0
}
