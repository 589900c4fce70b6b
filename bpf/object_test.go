package bpf

import (
	"bytes"
	_ "embed"
	"fmt"
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
	programs := map[string]map[string]string{} // by name, then architecture
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
			if programs[name] == nil {
				programs[name] = map[string]string{}
			}
			programs[name][arch] = fmt.Sprint(p.Instructions)
		}
	}
	for name, of := range programs {
		if len(of["amd64"]) == 0 || of["amd64"] != of["arm64"] {
			t.Errorf("program %s is not the same for both", name)
		}
	}
}
