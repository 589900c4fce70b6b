// Package rootfs turns the rootfs mounts that containerd hands to a shim into disks for a machine. Images (of the cube,
// blockfile and erofs snapshotters) are plugged in as they are; directories and overlays of them (containerd's
// overlayfs and native snapshotters, `ctr run --rootfs`) are packed into a new image, so changes to them end with the
// container. The host mounts no image here.
package rootfs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
)

// maxDisks bounds the layers of a root: a machine has one SCSI bus.
const maxDisks = 120

// Source is where a container's root comes from.
type Source struct {
	// Owner is the container's id; the disks' serials are made from it.
	Owner string
	// Plugged: the machine is there already, so it can have no disk from its start; Take finds none.
	Plugged bool
	// Mounts are containerd's. Where there are none, Dir is the root.
	Mounts []*types.Mount
	Dir    string
	// Scratch is a directory where packed images go, ImageSize their size: what the container can write at most.
	Scratch   string
	ImageSize int64
	// MountPoint is an empty directory to look at the mounts through. Nothing is ever mounted there in the mount
	// namespace of the host.
	MountPoint string
}

// Root is a container's root as disks.
type Root struct {
	Disks []vmm.Disk
	// Packed: the disk is a copy made for this container, and ends with it.
	Packed bool
	// Guest tells the agent how to make a root of them.
	Guest *api.Rootfs
}

// Close closes the images. Those that were plugged in stay plugged in.
func (r *Root) Close() error {
	var errs []error
	for _, d := range r.Disks {
		errs = append(errs, d.File.Close())
	}
	r.Disks = nil
	return errors.Join(errs...)
}

// Open opens or makes the disks. The caller closes the Root.
func Open(ctx context.Context, src Source) (_ *Root, err error) {
	r := &Root{Guest: &api.Rootfs{}}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(r.Close)

	switch {
	case len(src.Mounts) == 0:
		return r, r.pack(ctx, src, bind(src.Dir))
	case onHost(src.Mounts):
		return r, r.pack(ctx, src, src.Mounts)
	}
	return r, r.images(src)
}

// onHost tells mounts that are made of directories of the host: the last one decides, as it is the root.
func onHost(mounts []*types.Mount) bool {
	last := mounts[len(mounts)-1]
	return (last.Type == "overlay" || last.Type == "bind" || slices.Contains(last.Options, "rbind") || slices.Contains(last.Options, "bind")) &&
		!templated(last)
}

func bind(dir string) []*types.Mount {
	return []*types.Mount{{Type: "bind", Source: dir, Options: []string{"rbind", "ro"}}}
}

// pack makes one new, writable disk of what the mounts show.
func (r *Root) pack(ctx context.Context, src Source, mounts []*types.Mount) error {
	f, err := pack(ctx, src, mounts)
	if err != nil {
		return err
	}
	r.Packed = true
	return r.add(src, f, "ext4", false, nil)
}

// Take takes the disk that the machine can have from its start out of Disks, and returns its image, nil when there is
// none. The caller closes it.
func (r *Root) Take() *os.File {
	for i, d := range r.Disks {
		if d.Serial == vmm.RootSerial {
			r.Disks = slices.Delete(r.Disks, i, i+1)
			return d.File
		}
	}
	return nil
}

// add appends a disk, which owns f then. The first writable one is what Take takes.
func (r *Root) add(src Source, f *os.File, fstype string, readOnly bool, options []string) error {
	fi, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	serial := vmm.RootSerial
	if src.Plugged || readOnly || slices.ContainsFunc(r.Guest.Disks, func(d *api.Disk) bool { return d.Serial == vmm.RootSerial }) {
		serial = Serial(src.Owner, len(r.Disks))
	}
	if readOnly {
		options = append(options, "ro")
	}
	r.Disks = append(r.Disks, vmm.Disk{Serial: serial, File: f, ReadOnly: readOnly})
	r.Guest.Disks = append(r.Guest.Disks, &api.Disk{Serial: serial, Fstype: fstype, Options: options, Bytes: uint64(fi.Size())})
	return nil
}

// Serial names the i-th disk of a container's root, if it is plugged in: 15 characters at most, of the 20 that a serial may have.
func Serial(owner string, i int) string {
	sum := sha256.Sum256([]byte(owner))
	return fmt.Sprintf("r%x-%d", sum[:5], i)
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

func unsupported(format string, args ...any) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
}

// describe is a mount in an error.
func describe(m *types.Mount) string {
	s := fmt.Sprintf("%s mount of %s", m.Type, m.Source)
	if len(m.Options) > 0 {
		s += " with " + strings.Join(m.Options, ",")
	}
	return s
}

var _ io.Closer = (*Root)(nil)
