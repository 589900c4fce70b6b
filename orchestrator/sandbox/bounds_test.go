package sandbox

import (
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/cubesandbox/cube/internal/config"
)

// TestBounds: of an image that a team has named nothing is fetched that doesn't fit, whatever it says of itself; of one that the host's
// own users have, all is.
func TestBounds(t *testing.T) {
	const manifest, layer, other = ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageLayerGzip, "application/x-other"
	part := func(kind string, size int64) ocispec.Descriptor {
		return ocispec.Descriptor{MediaType: kind, Size: size}
	}
	const mib = 1 << 20
	for name, tc := range map[string]struct {
		outside bool
		full    bool
		parts   []ocispec.Descriptor
		is      func(error) bool // of the last of them
	}{
		"as large as can be":  {true, false, []ocispec.Descriptor{part(manifest, mib), part(layer, 50*mib), part(layer, 49*mib)}, nil},
		"too large in all":    {true, false, []ocispec.Descriptor{part(manifest, mib), part(layer, 50*mib), part(layer, 50*mib)}, errdefs.IsOutOfRange},
		"too large":           {true, false, []ocispec.Descriptor{part(layer, 1<<63-1)}, errdefs.IsOutOfRange},
		"round the corner":    {true, false, []ocispec.Descriptor{part(layer, 99*mib), part(layer, -50*mib)}, errdefs.IsOutOfRange},
		"a large manifest":    {true, false, []ocispec.Descriptor{part(manifest, 9*mib)}, errdefs.IsOutOfRange},
		"a large something":   {true, false, []ocispec.Descriptor{part(other, 9*mib)}, errdefs.IsOutOfRange},
		"much of something":   {true, false, []ocispec.Descriptor{part(other, 8*mib), part(layer, 93*mib)}, errdefs.IsOutOfRange},
		"a full disk":         {true, true, []ocispec.Descriptor{part(layer, mib)}, errdefs.IsResourceExhausted},
		"of the host's users": {false, true, []ocispec.Descriptor{part(manifest, 9*mib), part(layer, 1<<50)}, nil},
	} {
		cfg := config.Default()
		cfg.StateDir, cfg.Store.DiskSize, cfg.Store.HighWatermark = t.TempDir(), 100*mib, 100
		if tc.full {
			cfg.Store.HighWatermark = 0
		}
		var remote client.RemoteContext
		for _, o := range (&Client{cfg: cfg}).remote(t.Context(), "registry.example/a:b", PullOptions{Outside: tc.outside}) {
			if err := o(nil, &remote); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		for i, p := range tc.parts {
			if err != nil {
				t.Errorf("%s: part %d: %v", name, i-1, err)
			}
			for _, h := range remote.BaseHandlers {
				_, err = h.Handle(t.Context(), p)
			}
		}
		if tc.is == nil && err != nil || tc.is != nil && !tc.is(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
