package spec

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestGroup(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		group       string
		sandbox     bool
	}{
		"none":            {nil, "", false},
		"empty":           {map[string]string{runcGroup: "", sandboxID: ""}, "", false},
		"runc's":          {map[string]string{runcGroup: "a"}, "a", false},
		"CRI's":           {map[string]string{sandboxID: "b", containerType: "container"}, "b", false},
		"runc's first":    {map[string]string{runcGroup: "a", sandboxID: "b"}, "a", false},
		"sandbox":         {map[string]string{sandboxID: "b", containerType: "sandbox"}, "b", true},
		"others of CRI's": {map[string]string{"io.kubernetes.cri.sandbox-name": "a/b", "io.kubernetes.cri.image-name": "x"}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			s := plain()
			s.Annotations = c.annotations
			dir := bundle(t, s)
			if g, err := Group(dir); g != c.group || err != nil {
				t.Errorf("group %q, %v", g, err)
			}
			p, err := Transform(s, defaults())
			if err != nil {
				t.Fatal(err)
			}
			if p.Group != c.group || p.Sandbox != c.sandbox {
				t.Errorf("group %q, sandbox %v", p.Group, p.Sandbox)
			}
			if p.Guest.Annotations != nil {
				t.Error("the guest got annotations")
			}
		})
	}
}

func TestGroupOfABundle(t *testing.T) {
	dir := t.TempDir()
	if g, err := Group(dir); g != "" || err != nil {
		t.Errorf("without a config.json: %q, %v", g, err)
	}
	for what, content := range map[string][]byte{
		"cut off": []byte(`{"annotations":{"`),
		"huge":    make([]byte, maxSize+1),
		"a path":  []byte(`{"annotations":{"` + runcGroup + `":"../x"}}`),
		"long":    []byte(`{"annotations":{"` + sandboxID + `":"` + strings.Repeat("x", 200) + `"}}`),
	} {
		if err := os.WriteFile(filepath.Join(dir, "config.json"), content, 0o600); err != nil {
			t.Fatal(err)
		}
		if g, err := Group(dir); g != "" || !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %q, %v", what, g, err)
		}
	}
}

// bundle has the spec's config.json.
func bundle(t *testing.T, s *specs.Spec) string {
	t.Helper()
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestSandboxSize: a pod's machine has the size of the pod, not of the container that stands for it.
func TestSandboxSize(t *testing.T) {
	sandbox := map[string]string{containerType: "sandbox", sandboxID: "pod"}
	for name, c := range map[string]struct {
		annotations map[string]string
		vcpus, mib  int
		limit       float64
		says        string
	}{
		"none":            {nil, 1, 256, 0, ""},
		"unlimited":       {map[string]string{sandboxMemory: "0", sandboxQuota: "0", sandboxPeriod: "100000", "io.kubernetes.cri.sandbox-cpu-shares": "4096"}, 1, 256, 0, ""},
		"no quota":        {map[string]string{sandboxQuota: "-1", sandboxPeriod: "100000"}, 1, 256, 0, ""},
		"limits":          {map[string]string{sandboxMemory: "1073741824", sandboxQuota: "250000", sandboxPeriod: "100000"}, 3, 1024 + guestOverheadMiB, 2.5, ""},
		"annotations":     {map[string]string{sandboxMemory: "1073741824", sandboxQuota: "250000", sandboxPeriod: "100000", Memory: "512MiB", VCPUs: "2"}, 2, 512, 2.5, ""},
		"no number":       {map[string]string{sandboxMemory: "1GiB"}, 0, 0, 0, sandboxMemory},
		"no quota at all": {map[string]string{sandboxQuota: "x"}, 0, 0, 0, sandboxQuota},
		"too much":        {map[string]string{sandboxMemory: "1099511627776"}, 0, 0, 0, "1TiB"},
	} {
		t.Run(name, func(t *testing.T) {
			s := plain()
			s.Annotations = map[string]string{}
			for _, from := range []map[string]string{sandbox, c.annotations} {
				for k, v := range from {
					s.Annotations[k] = v
				}
			}
			p, err := Transform(s, defaults())
			if c.says != "" {
				refused(t, err, errdefs.IsInvalidArgument, c.says)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if p.Shape.VCPUs != c.vcpus || p.Shape.MemoryMiB != c.mib || p.CPULimit != c.limit {
				t.Errorf("%v with limit %v", p.Shape, p.CPULimit)
			}
		})
	}
	// A member says nothing about the pod's size.
	s := member(plain())
	s.Annotations[sandboxMemory] = "not looked at"
	s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: ptr(int64(units.GiB))}
	p, err := Transform(s, defaults())
	if err != nil || p.Shape.MemoryMiB != 1024+guestOverheadMiB {
		t.Errorf("a member: %+v, %v", p, err)
	}
}
