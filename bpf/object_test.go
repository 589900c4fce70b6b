package bpf

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"testing"

	"github.com/cilium/ebpf"
)

var (
	//go:embed dp_x86_bpfel.o
	objectAMD64 []byte
	//go:embed dp_arm64_bpfel.o
	objectARM64 []byte
)

// TestObjects: both architectures' objects have all that is loaded, and the same instructions: what one's kernel has accepted
// and done right the other's is given too.
func TestObjects(t *testing.T) {
	tags := map[string]map[string]string{}
	for arch, object := range map[string][]byte{"amd64": objectAMD64, "arm64": objectARM64} {
		spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
		if err != nil {
			t.Fatalf("%s: %v", arch, err)
		}
		if err := spec.Assign(&dpSpecs{}); err != nil {
			t.Errorf("%s: %v", arch, err)
		}
		if spec.Types == nil {
			t.Errorf("%s: no BTF", arch)
		}
		for name, p := range spec.Programs {
			tag, err := p.Instructions.Tag(binary.LittleEndian)
			if err != nil {
				t.Fatalf("%s: %s: %v", arch, name, err)
			}
			if tags[name] == nil {
				tags[name] = map[string]string{}
			}
			tags[name][arch] = tag
		}
	}
	for name, tag := range tags {
		if tag["amd64"] != tag["arm64"] {
			t.Errorf("program %s is %v", name, tag)
		}
	}
}
