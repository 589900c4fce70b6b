package sandbox

import (
	"reflect"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/shim/spec"
)

// TestNetworkAnnotation: the shim reads what was asked for, and that nothing was.
func TestNetworkAnnotation(t *testing.T) {
	img := imagespec.ImageConfig{Cmd: []string{"true"}}
	made, err := generate(t, Spec{ID: "c"}, img)
	if err != nil || made.Annotations[spec.NetworkKey] != spec.NoNetwork {
		t.Errorf("without a network: %v, %v", made.Annotations, err)
	}
	want := &network.Settings{Policy: &policy.Policy{Rules: []policy.Rule{{Action: policy.Direct, To: "1.2.3.0/24", Ports: []string{"443"}, Protocol: "tcp"}}}}
	made, err = generate(t, Spec{ID: "c", Network: want, Annotations: map[string]string{"io.cube.vcpus": "2"}}, img)
	if err != nil {
		t.Fatal(err)
	}
	got, err := network.ParseSettings([]byte(made.Annotations[spec.NetworkKey]))
	if err != nil || !reflect.DeepEqual(got, want) || made.Annotations["io.cube.vcpus"] != "2" {
		t.Errorf("%v is read as %+v, %v", made.Annotations, got, err)
	}
	if _, err := generate(t, Spec{ID: "c", Annotations: map[string]string{spec.NetworkKey: "none"}}, img); err == nil || !strings.Contains(err.Error(), spec.NetworkKey) {
		t.Errorf("beside the network's settings: %v", err)
	}
}
