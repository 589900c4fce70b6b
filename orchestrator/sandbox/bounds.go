package sandbox

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/space"
)

// maxManifest bounds what of an image is read into memory, in bytes: manifests and the configuration.
const maxManifest = 8 << 20

// bounds has an image that somebody else has named be of a size that it can be of use with, and not fill the host's disk. It sees each
// part before that is fetched; what a registry sends beyond a part's size containerd doesn't take.
type bounds struct {
	cfg  *config.Config
	seen atomic.Int64 // bytes
}

var _ images.Handler = (*bounds)(nil)

// Handle is of images.Handler. An image that is too large is errdefs.ErrOutOfRange, a disk that is full errdefs.ErrResourceExhausted.
func (b *bounds) Handle(_ context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	say := func(n int64) string { return units.BytesSize(float64(n)) }
	most := int64(b.cfg.Store.DiskSize)
	switch {
	case d.Size < 0:
		return nil, errdefs.ErrOutOfRange.WithMessage(fmt.Sprintf("a part of it has %d bytes", d.Size))
	case !images.IsLayerType(d.MediaType) && d.Size > maxManifest:
		return nil, errdefs.ErrOutOfRange.WithMessage(fmt.Sprintf("a part of it of type %.100q has %s, which can be %s", d.MediaType, say(d.Size), say(maxManifest)))
	case d.Size > most || b.seen.Add(d.Size) > most:
		return nil, errdefs.ErrOutOfRange.WithMessage(fmt.Sprintf("it has more than %s, which a sandbox's disk has (store.disk_size)", say(most)))
	case b.cfg.Containerd.Address != "":
		return nil, nil // on whichever disk that one has it
	}
	r, err := space.Of(b.cfg.StateDir)
	if err != nil {
		return nil, err
	}
	if r.Free -= d.Size; r.Above(b.cfg.Store.HighWatermark) {
		return nil, errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("%s wouldn't have the %d %% free that are kept for what runs (store.high_watermark): `cube df` tells what takes its disk", b.cfg.StateDir, 100-b.cfg.Store.HighWatermark))
	}
	return nil, nil
}
