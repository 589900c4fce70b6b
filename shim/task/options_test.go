package task

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/internal/config"
)

// TestOptions: of the three kinds of options that containerd may send, one names a configuration or is one.
func TestOptions(t *testing.T) {
	marshal := func(v any) *anypb.Any {
		a, err := typeurl.MarshalAnyToProto(v)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	for name, c := range map[string]struct {
		options func(file string, body []byte) *anypb.Any
		memory  int    // of the machine, in MiB
		says    string // an error instead
	}{
		"none": {func(string, []byte) *anypb.Any { return nil }, 256, ""},
		"runc's": {func(string, []byte) *anypb.Any {
			return marshal(&options.Options{BinaryName: "runc", SystemdCgroup: true})
		}, 256, ""},
		"empty": {func(string, []byte) *anypb.Any { return marshal(&runtimeoptions.Options{TypeUrl: "x"}) }, 256, ""},
		"path":  {func(file string, _ []byte) *anypb.Any { return marshal(&runtimeoptions.Options{ConfigPath: file}) }, 320, ""},
		"body":  {func(_ string, body []byte) *anypb.Any { return marshal(&runtimeoptions.Options{ConfigBody: body}) }, 384, ""},
		"both": {func(file string, body []byte) *anypb.Any {
			return marshal(&runtimeoptions.Options{ConfigPath: file, ConfigBody: body})
		}, 320, ""},
		"no such file": {func(string, []byte) *anypb.Any { return marshal(&runtimeoptions.Options{ConfigPath: "/none"}) }, 0, "/none"},
		"nonsense": {func(string, []byte) *anypb.Any {
			return marshal(&runtimeoptions.Options{ConfigBody: []byte("memory = 1")})
		}, 0, "unknown key"},
		"broken": {func(string, []byte) *anypb.Any {
			a := marshal(&runtimeoptions.Options{})
			a.Value = []byte{0xff}
			return a
		}, 0, "runtime options"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			base, err := os.ReadFile(os.Getenv(config.FileEnv))
			h.must(err)
			file := filepath.Join(t.TempDir(), "config.toml")
			h.must(os.WriteFile(file, append(base, "[vm]\nmemory = '320MiB'\n"...), 0o600))
			h.spec("sleep")
			r := h.createRequest()
			r.Options = c.options(file, append(base, "[vm]\nmemory = '384MiB'\n"...))
			_, err = h.Service.Create(t.Context(), r)
			if c.says != "" {
				if !errdefs.IsInvalidArgument(errgrpc.ToNative(err)) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v", err)
				}
				return
			}
			h.must(err)
			if got := h.launcher.Last().Shape().MemoryMiB; got != c.memory {
				t.Errorf("the machine has %d MiB", got)
			}
			// What it was made with is what it can be undone with.
			cfg, err := config.Load(h.podState().ConfigFile)
			h.must(err)
			if got := int(cfg.VM.Memory >> 20); got != c.memory {
				t.Errorf("the record's configuration says %d MiB", got)
			}
		})
	}
}
