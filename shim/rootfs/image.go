package rootfs

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/guestmark"
)

// imageTypes are the file systems that the guest mounts from a disk.
var imageTypes = []string{"ext4", "xfs", "erofs", "squashfs"}

// hostOptions are how the cube snapshotter has the host unpack a layer without losing data to a full store. A guest whose
// disk's store is full stands still instead, and would only be slower with them.
var hostOptions = []string{"data_err=abort", "dioread_lock"}

// readOnlyTypes can't be written, whatever the options say.
var readOnlyTypes = []string{"erofs", "squashfs"}

// sectorSize: a disk is made of these; what is left over at an image's end would be lost.
const sectorSize = 512

// images takes mounts of images: one that is the root, or layers and what the last mount makes of them, in the
// templates of containerd's mount manager ("{{ mount 0 }}/upper", "{{ overlay 1 3 }}").
func (r *Root) images(src Source) error {
	layers, top := src.Mounts, (*types.Mount)(nil)
	if last := src.Mounts[len(src.Mounts)-1]; templated(last) {
		layers, top = src.Mounts[:len(src.Mounts)-1], last
	}
	if len(layers) > maxDisks {
		return unsupported("the root file system has %d layers; a machine takes %d", len(layers), maxDisks)
	}
	if top == nil && len(layers) != 1 {
		return invalid("%d rootfs mounts, and none that puts them together", len(layers))
	}
	for _, m := range layers {
		if err := r.image(src, m); err != nil {
			return err
		}
	}
	if top == nil {
		return nil
	}
	if err := r.compose(top); err != nil {
		return fmt.Errorf("%s: %w", describe(top), err)
	}
	return nil
}

// image opens one image and adds it.
func (r *Root) image(src Source, m *types.Mount) error {
	fstype := m.Type
	if fstype == guestmark.MountType { // the cube snapshotter's ext4, after a guest had it
		fstype = "ext4"
	}
	if !slices.Contains(imageTypes, fstype) {
		return unsupported("the snapshotter's %s can't be given to a virtual machine; use the cube snapshotter", describe(m))
	}
	if m.Target != "" {
		return unsupported("%s on %s: only the root itself can be an image", describe(m), m.Target)
	}
	readOnly := slices.Contains(readOnlyTypes, fstype)
	var options []string
	for _, o := range m.Options {
		switch {
		case o == "ro":
			readOnly = true
		case o == "rw", o == "loop", strings.HasPrefix(o, "loop="), slices.Contains(hostOptions, o):
		case strings.HasPrefix(o, "device="):
			return unsupported("%s: merged erofs layers are not supported; set max_unmerged_layers = 0 for the erofs snapshotter", describe(m))
		case strings.HasPrefix(o, "X-containerd.dmverity"):
			return unsupported("%s: dm-verity is not supported; set dmverity_mode = \"off\" for the erofs snapshotter", describe(m))
		case strings.HasPrefix(o, "X-") || strings.HasPrefix(o, "x-"):
		default:
			options = append(options, o)
		}
	}
	f, err := open(m.Source, readOnly)
	if err != nil {
		return err
	}
	return r.add(src, f, fstype, readOnly, options)
}

// open opens an image for a machine. One that may be written is marked first, so that nobody mounts it on the host
// afterwards, and must not be in another machine's hands.
func open(path string, readOnly bool) (*os.File, error) {
	mode := unix.O_RDWR
	if readOnly {
		mode = unix.O_RDONLY
	}
	f, err := os.OpenFile(path, mode|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open the root disk: %w", err)
	}
	if err := check(f, readOnly); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func check(f *os.File, readOnly bool) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	switch {
	case !fi.Mode().IsRegular():
		return unsupported("root disk %s is not a regular file; block devices can't be given to a machine", f.Name())
	case fi.Size() == 0:
		return unsupported("root disk %s is empty", f.Name())
	case fi.Size()%sectorSize != 0:
		return unsupported("root disk %s has %d bytes, which is not a multiple of %d", f.Name(), fi.Size(), sectorSize)
	case readOnly:
		return nil
	}
	// QEMU locks the images it has open; to ask before is to give an error that a user understands.
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return fmt.Errorf("look for locks on %s: %w", f.Name(), err)
	}
	if lock.Type != unix.F_UNLCK {
		return unsupported("root disk %s is in use by another virtual machine", f.Name())
	}
	return guestmark.Set(f)
}

var (
	mountTemplate   = regexp.MustCompile(`^\{\{ *mount (\d+) *\}\}((?:/[A-Za-z0-9._-]+)*)$`)
	overlayTemplate = regexp.MustCompile(`^\{\{ *overlay (\d+) (\d+) *\}\}$`)
)

// templated tells a mount that is made of the mounts before it.
func templated(m *types.Mount) bool { return strings.HasPrefix(m.Type, "format/") }

// compose makes the root of the disks as the last mount says.
func (r *Root) compose(m *types.Mount) error {
	switch m.Type {
	case "format/bind", "format/mkdir/bind":
		d, err := r.dir(m.Source)
		if err != nil {
			return err
		}
		if d.Path != "" || len(r.Disks) != 1 {
			return unsupported("a container without an image can't run from the erofs snapshotter")
		}
		return nil
	case "format/overlay", "format/mkdir/overlay":
		return r.overlay(m.Options)
	}
	return unsupported("mount type %s is not supported", m.Type)
}

func (r *Root) overlay(options []string) (err error) {
	o := &api.Overlay{}
	for _, opt := range options {
		key, value, _ := strings.Cut(opt, "=")
		switch {
		case key == "lowerdir":
			o.Lower, err = r.lower(value)
		case key == "upperdir":
			o.Upper, err = r.dir(value)
		case key == "workdir":
			o.Work, err = r.dir(value)
		case key == "uidmap" || key == "gidmap":
			err = unsupported("id-mapped layers are not supported")
		case key == "ro" || key == "rw" || strings.HasPrefix(key, "X-"):
		default:
			o.Options = append(o.Options, opt)
		}
		if err != nil {
			return err
		}
	}
	switch {
	case len(o.Lower) == 0:
		return invalid("no lowerdir")
	case (o.Upper == nil) != (o.Work == nil):
		return invalid("upperdir and workdir need one another")
	}
	r.Guest.Overlay = o
	return nil
}

func (r *Root) lower(value string) ([]*api.LayerDir, error) {
	m := overlayTemplate.FindStringSubmatch(value)
	if m == nil {
		d, err := r.dir(value)
		return []*api.LayerDir{d}, err
	}
	first, err := r.index(m[1])
	if err != nil {
		return nil, err
	}
	last, err := r.index(m[2])
	if err != nil {
		return nil, err
	}
	step := uint32(1)
	if first > last {
		step = ^uint32(0) // downwards
	}
	var dirs []*api.LayerDir
	for i := first; ; i += step {
		dirs = append(dirs, &api.LayerDir{Disk: i})
		if i == last {
			return dirs, nil
		}
	}
}

func (r *Root) dir(value string) (*api.LayerDir, error) {
	m := mountTemplate.FindStringSubmatch(value)
	if m == nil {
		return nil, unsupported("%q is a directory of the host; set default_size for the erofs snapshotter, so that it makes an image of it", value)
	}
	i, err := r.index(m[1])
	if err != nil {
		return nil, err
	}
	path := strings.TrimPrefix(m[2], "/")
	if slices.Contains(strings.Split(path, "/"), "..") {
		return nil, invalid("path %q", value)
	}
	return &api.LayerDir{Disk: i, Path: path}, nil
}

func (r *Root) index(s string) (uint32, error) {
	i, err := strconv.Atoi(s)
	if err != nil || i >= len(r.Disks) {
		return 0, invalid("there is no mount %s", s)
	}
	return uint32(i), nil
}
