package spec

import (
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/identifiers"

	"github.com/cubesandbox/cube/internal/config"
)

// The annotations of this runtime. Whatever else begins with the prefix is a mistake, and said so.
const (
	annotationPrefix = "io.cube."
	// VCPUs is the number of virtual CPUs, a whole number.
	VCPUs = annotationPrefix + "vcpus"
	// Memory is the machine's memory, like "512MiB" or a number of bytes.
	Memory = annotationPrefix + "memory"
)

// The annotations of containerd's that matter here.
const (
	runcGroup     = "io.containerd.runc.v2.group"
	sandboxID     = "io.kubernetes.cri.sandbox-id"
	containerType = "io.kubernetes.cri.container-type"
	sandboxMemory = "io.kubernetes.cri.sandbox-memory"
	sandboxQuota  = "io.kubernetes.cri.sandbox-cpu-quota"
	sandboxPeriod = "io.kubernetes.cri.sandbox-cpu-period"
)

// Group returns the pod that the bundle's container says it belongs to, "" if none. A bundle without a config.json is a
// sandbox's, which is a pod of its own.
func Group(bundle string) (string, error) {
	var s struct {
		Annotations map[string]string `json:"annotations"`
	}
	_, err := read(bundle, &s)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return group(s.Annotations)
}

// group is the first name in the order of containerd's own shim for runc. It becomes part of the machine's names.
func group(annotations map[string]string) (string, error) {
	for _, key := range []string{runcGroup, sandboxID} {
		if id := annotations[key]; id != "" {
			if err := identifiers.Validate(id); err != nil {
				return "", invalid("annotation %s is no id: %v", key, err)
			}
			return id, nil
		}
	}
	return "", nil
}

func annotations(p *Plan, _ *config.Config) (err error) {
	known := []string{Memory, VCPUs}
	for key := range p.Guest.Annotations {
		if strings.HasPrefix(key, annotationPrefix) && !slices.Contains(known, key) {
			return invalid("unknown annotation %s; known are %s", key, strings.Join(known, ", "))
		}
	}
	p.Sandbox = p.Guest.Annotations[containerType] == "sandbox"
	p.Group, err = group(p.Guest.Annotations)
	return err
}
