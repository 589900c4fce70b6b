package sandbox

import (
	"context"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// TestReading: what is read into memory is looked at before that, whatever it says to be and wherever it comes from.
func TestReading(t *testing.T) {
	const manifest, index, config, layer = ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageConfig, ocispec.MediaTypeImageLayerGzip
	there := map[digest.Digest]int64{"large": 10 << 20}
	info := func(_ context.Context, d digest.Digest) (content.Info, error) {
		n, ok := there[d]
		if !ok {
			return content.Info{}, errdefs.ErrNotFound
		}
		return content.Info{Digest: d, Size: n}, nil
	}
	many := make([]ocispec.Descriptor, maxParts+1)
	for name, c := range map[string]struct {
		root  ocispec.Descriptor
		parts []ocispec.Descriptor
		want  string
	}{
		"fine":                        {ocispec.Descriptor{MediaType: manifest, Size: 1000}, []ocispec.Descriptor{{MediaType: config, Size: 2000}, {MediaType: layer, Size: 90 << 20, Digest: "large"}}, ""},
		"configuration as a layer":    {ocispec.Descriptor{MediaType: manifest, Size: 1000}, []ocispec.Descriptor{{MediaType: layer, Size: 10 << 20}}, "its manifest or configuration has 10MiB"},
		"configuration that is there": {ocispec.Descriptor{MediaType: manifest, Size: 1000}, []ocispec.Descriptor{{MediaType: config, Size: 2, Digest: "large"}}, "its manifest or configuration has 10MiB"},
		"manifest that is there":      {ocispec.Descriptor{MediaType: manifest, Size: 2, Digest: "large"}, nil, "its manifest or configuration has 10MiB"},
		"index that is there":         {ocispec.Descriptor{MediaType: index, Size: 2, Digest: "large"}, nil, "its manifest or configuration has 10MiB"},
		"many":                        {ocispec.Descriptor{MediaType: manifest, Size: 1000}, many, "more than 1000 parts"},
	} {
		asked := false
		h := (&reading{info: info}).wrap(images.HandlerFunc(func(context.Context, ocispec.Descriptor) ([]ocispec.Descriptor, error) {
			asked = true
			return c.parts, nil
		}))
		_, err := h.Handle(t.Context(), c.root)
		if c.want == "" && err != nil || c.want != "" && (!errdefs.IsOutOfRange(err) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", name, err)
		}
		if asked != (c.parts != nil) {
			t.Errorf("%s: it was read: %v", name, asked)
		}
	}
}
