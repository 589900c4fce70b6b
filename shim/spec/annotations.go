package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/identifiers"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
)

// The annotations of this runtime. Whatever else begins with the prefix is a mistake, and said so.
const (
	annotationPrefix = "io.cube."
	// VCPUs is the number of virtual CPUs, a whole number.
	VCPUs = annotationPrefix + "vcpus"
	// Memory is the machine's memory, like "512MiB" or a number of bytes.
	Memory = annotationPrefix + "memory"
	// NetworkKey says what network the machine has: "none", or settings of package network's in JSON. Without it, a CNI
	// plugin opens one.
	NetworkKey = annotationPrefix + "network"
)

// NoNetwork is NetworkKey's value for a machine that is to have no network card.
const NoNetwork = "none"

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
	known := []string{Memory, NetworkKey, VCPUs}
	for key := range p.Guest.Annotations {
		if strings.HasPrefix(key, annotationPrefix) && !slices.Contains(known, key) {
			return invalid("unknown annotation %s; known are %s", key, strings.Join(known, ", "))
		}
	}
	p.Sandbox = p.Guest.Annotations[containerType] == "sandbox"
	if p.Group, err = group(p.Guest.Annotations); err != nil {
		return err
	}
	p.Network, err = networkOf(p.Guest.Annotations)
	return err
}

func networkOf(annotations map[string]string) (n Network, err error) {
	value, ok := annotations[NetworkKey]
	switch {
	case !ok:
		return n, nil
	case value == NoNetwork:
		return Network{None: true}, nil
	case !strings.HasPrefix(value, "{"):
		return n, invalid("annotation %s is %q; it is %q or settings in JSON: {…}", NetworkKey, value, NoNetwork)
	}
	if n.Settings, err = network.ParseSettings([]byte(value)); err != nil {
		return n, fmt.Errorf("annotation %s: %w", NetworkKey, err)
	}
	return n, nil
}
