package sandbox

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxParts bounds the parts of an image: its layers are far fewer, and no index has so many below another one.
const maxParts = 1000

// reading keeps what is read into memory as a whole within bounds where the sizes of what is fetched say nothing of it: a configuration
// may call itself a layer, and what containerd has already, as a layer of another image, isn't fetched.
type reading struct {
	info  func(context.Context, digest.Digest) (content.Info, error) // of what containerd has
	parts atomic.Int64
}

// wrap has parts be looked at before they are read. What is too large is errdefs.ErrOutOfRange.
func (w *reading) wrap(h images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, part ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if !images.IsLayerType(part.MediaType) {
			if err := w.check(ctx, part); err != nil {
				return nil, err
			}
		}
		parts, err := h.Handle(ctx, part)
		if err == nil && images.IsManifestType(part.MediaType) && len(parts) > 0 {
			err = w.check(ctx, parts[0]) // the configuration
		}
		if err == nil && w.parts.Add(int64(len(parts))) > maxParts {
			err = errdefs.ErrOutOfRange.WithMessage(fmt.Sprintf("it has more than %d parts", maxParts))
		}
		return parts, err
	})
}

func (w *reading) check(ctx context.Context, part ocispec.Descriptor) error {
	size := part.Size
	if info, err := w.info(ctx, part.Digest); err == nil {
		size = max(size, info.Size)
	}
	if size > maxManifest {
		return errdefs.ErrOutOfRange.WithMessage(fmt.Sprintf("its manifest or configuration has %s, which can be %s", units.BytesSize(float64(size)), units.BytesSize(maxManifest)))
	}
	return nil
}
