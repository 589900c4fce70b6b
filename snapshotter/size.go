package snapshotter

import (
	"fmt"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/snapshotter/image"
)

// SizeLabel is how large a root disk is, like "20GiB" or "512m". containerd passes labels with this prefix on: from
// `ctr run --snapshotter-label`, a client's WithNewSnapshot, or an annotation of an image's first layer. A disk can be
// larger than its parent's, not smaller. Children inherit the label; without one, a disk has at least store.disk_size.
const SizeLabel = "containerd.io/snapshot/cube.size"

// sizeStep is what disk sizes are multiples of, in bytes.
const sizeStep = units.MiB

// diskSize decides on a new disk's size.
func (s *Snapshotter) diskSize(labels map[string]string, p parentImage) (int64, error) {
	label, ok := labels[SizeLabel]
	if !ok {
		if _, ok := p.labels[SizeLabel]; ok {
			return p.size, nil
		}
		return max(int64(s.cfg.Store.DiskSize), p.size), nil
	}
	size, err := units.RAMInBytes(label)
	if err != nil {
		return 0, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("label %s = %q is not a size (use for example 20GiB)", SizeLabel, label))
	}
	size = (size + sizeStep - 1) / sizeStep * sizeStep
	switch {
	case size < image.MinSize || size > image.MaxSize:
		return 0, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("label %s = %q must be between %s and %s", SizeLabel, label,
			units.BytesSize(float64(image.MinSize)), units.BytesSize(float64(image.MaxSize))))
	case size < p.size:
		return 0, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("label %s = %q is smaller than the image's disk of %s, which can grow but not shrink", SizeLabel, label,
			units.BytesSize(float64(p.size))))
	}
	return size, nil
}

// inheritSize adds the label of the snapshot that another one comes from, unless that one has its own.
func inheritSize(opts []snapshots.Opt, own, from map[string]string) []snapshots.Opt {
	size, ok := from[SizeLabel]
	if _, has := own[SizeLabel]; has || !ok {
		return opts
	}
	return append(opts[:len(opts):len(opts)], snapshots.WithLabels(map[string]string{SizeLabel: size}))
}
