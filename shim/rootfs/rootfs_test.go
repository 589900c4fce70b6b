package rootfs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/vmm"
)

func image(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func source(t *testing.T, mounts ...*types.Mount) Source {
	t.Helper()
	return Source{
		Owner:      "box",
		Mounts:     mounts,
		Scratch:    filepath.Join(t.TempDir(), "scratch"),
		ImageSize:  64 << 20,
		MountPoint: t.TempDir(),
	}
}

func openRoot(t *testing.T, mounts ...*types.Mount) *Root {
	t.Helper()
	r, err := Open(t.Context(), source(t, mounts...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func mnt(kind, source string, options ...string) *types.Mount {
	return &types.Mount{Type: kind, Source: source, Options: options}
}

func TestImage(t *testing.T) {
	img := image(t)
	r := openRoot(t, mnt("ext4", img, "rw", "loop", "noatime"))
	d := r.Disks[0]
	if len(r.Disks) != 1 || d.ReadOnly || d.Serial != vmm.RootSerial || len(d.Serial) > 20 {
		t.Errorf("disks %+v", r.Disks)
	}
	if g := r.Guest.Disks[0]; g.Serial != d.Serial || g.Fstype != "ext4" || strings.Join(g.Options, ",") != "noatime" || r.Guest.Overlay != nil {
		t.Errorf("guest %v", r.Guest)
	}
	if marked, err := guestmark.IsSet(img); err != nil || !marked {
		t.Errorf("a writable image was not marked: %v", err)
	}
	flags, err := unix.FcntlInt(d.File.Fd(), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Error("children inherit the image")
	}
}

// TestUsedImage is a disk of the cube snapshotter that a guest had before: only the host must not mount it.
func TestUsedImage(t *testing.T) {
	needRoot(t)
	img := image(t)
	r := openRoot(t, mnt(guestmark.MountType, img, "rw", "loop", "discard", "data_err=abort", "dioread_lock"))
	if g := r.Guest.Disks[0]; g.Fstype != "ext4" || strings.Join(g.Options, ",") != "discard" {
		t.Errorf("%v", g)
	}
}

func TestReadOnlyImage(t *testing.T) {
	img := image(t)
	r := openRoot(t, mnt("ext4", img, "ro", "loop"))
	if !r.Disks[0].ReadOnly || strings.Join(r.Guest.Disks[0].Options, ",") != "ro" {
		t.Errorf("%+v %v", r.Disks, r.Guest)
	}
	if _, err := r.Disks[0].File.WriteAt([]byte("x"), 0); err == nil {
		t.Error("opened for writing")
	}
	if marked, err := guestmark.IsSet(img); err != nil || marked {
		t.Errorf("marked although nobody can write: %v", err)
	}
}

// TestErofs has what containerd's erofs snapshotter hands out when the shim makes the overlay.
func TestErofs(t *testing.T) {
	rw, a, b := image(t), image(t), image(t)
	layers := func(t *types.Mount) []*types.Mount {
		return []*types.Mount{mnt("ext4", rw, "rw", "loop"), mnt("erofs", a, "ro", "loop"), mnt("erofs", b, "ro", "loop"), t}
	}
	r := openRoot(t, layers(mnt("format/mkdir/overlay", "overlay",
		"X-containerd.mkdir.path={{ mount 0 }}/upper:0755", "X-containerd.mkdir.path={{ mount 0 }}/work:0755",
		"workdir={{ mount 0 }}/work", "upperdir={{ mount 0 }}/upper", "lowerdir={{ overlay 1 2 }}", "index=off"))...)
	o := r.Guest.Overlay
	if len(r.Disks) != 3 || r.Disks[0].ReadOnly || !r.Disks[1].ReadOnly || !r.Disks[2].ReadOnly {
		t.Errorf("disks %+v", r.Disks)
	}
	if o.Upper.Disk != 0 || o.Upper.Path != "upper" || o.Work.Path != "work" || len(o.Lower) != 2 || o.Lower[0].Disk != 1 || o.Lower[1].Disk != 2 ||
		strings.Join(o.Options, ",") != "index=off" {
		t.Errorf("overlay %v", o)
	}

	r = openRoot(t, mnt("erofs", a, "ro", "loop"), mnt("erofs", b, "ro", "loop"), mnt("format/mkdir/overlay", "overlay", "ro", "lowerdir={{ overlay 1 0 }}"))
	if o := r.Guest.Overlay; o.Upper != nil || o.Work != nil || len(o.Lower) != 2 || o.Lower[0].Disk != 1 {
		t.Errorf("overlay %v", o)
	}
	r = openRoot(t, mnt("erofs", a, "ro", "loop"), mnt("format/bind", "{{ mount 0 }}", "ro", "rbind"))
	if r.Guest.Overlay != nil || len(r.Disks) != 1 {
		t.Errorf("root %v", r.Guest)
	}
}

func TestRefused(t *testing.T) {
	img, empty := image(t), filepath.Join(t.TempDir(), "empty")
	odd, dir := filepath.Join(t.TempDir(), "odd"), t.TempDir()
	for path, size := range map[string]int{empty: 0, odd: 1000} {
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	overlay := func(options ...string) []*types.Mount {
		return []*types.Mount{mnt("erofs", img, "ro"), mnt("format/mkdir/overlay", "overlay", options...)}
	}
	for name, c := range map[string]struct {
		mounts []*types.Mount
		says   string
	}{
		"missing":         {[]*types.Mount{mnt("ext4", img+".missing", "rw")}, "no such file"},
		"empty":           {[]*types.Mount{mnt("ext4", empty, "rw")}, "is empty"},
		"odd size":        {[]*types.Mount{mnt("ext4", odd, "rw")}, "multiple of 512"},
		"directory":       {[]*types.Mount{mnt("ext4", dir, "ro")}, "not a regular file"},
		"device":          {[]*types.Mount{mnt("ext4", "/dev/null", "rw")}, "not a regular file"},
		"type":            {[]*types.Mount{mnt("btrfs", img, "rw")}, "btrfs mount"},
		"two images":      {[]*types.Mount{mnt("ext4", img, "ro"), mnt("ext4", img, "ro")}, "puts them together"},
		"dm-verity":       {[]*types.Mount{mnt("erofs", img, "ro", "X-containerd.dmverity=/m")}, "dmverity_mode"},
		"merged":          {[]*types.Mount{mnt("erofs", img, "ro", "device=/b")}, "max_unmerged_layers"},
		"directory upper": {overlay("upperdir=/a", "workdir=/b", "lowerdir={{ mount 0 }}"), "default_size"},
		"no such mount":   {overlay("lowerdir={{ overlay 0 7 }}"), "no mount 7"},
		"no lower":        {overlay("ro"), "no lowerdir"},
		"upper alone":     {overlay("upperdir={{ mount 0 }}/u", "lowerdir={{ mount 0 }}"), "need one another"},
		"dots":            {overlay("upperdir={{ mount 0 }}/../u", "workdir={{ mount 0 }}/w", "lowerdir={{ mount 0 }}"), `path "`},
		"bind of a file":  {[]*types.Mount{mnt("bind", img, "rbind")}, "not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := Open(t.Context(), source(t, c.mounts...))
			if err == nil {
				r.Close()
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v", err)
			}
		})
	}
}

// TestInUse: a lock like QEMU's on a writable image is seen before QEMU is asked.
func TestInUse(t *testing.T) {
	img := image(t)
	f, err := os.OpenFile(img, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 100, Len: 1}); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), source(t, mnt("ext4", img, "rw")))
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("error %v", err)
	}
	openRoot(t, mnt("ext4", img, "ro"))
}

// read reads a file out of a packed image without mounting it.
func read(t *testing.T, r *Root, command string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	// A copy by name, as debugfs can't be handed an open file.
	if out, err := exec.Command("cp", "--sparse=always", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), r.Disks[0].File.Fd()), path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.Command("debugfs", "-R", command, path).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts in a mount namespace of its own")
	}
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		t.Skip("needs mkfs.ext4")
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPackDirectory(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	write(t, dir+"/etc/name", "hello")
	if err := os.Chown(dir+"/etc/name", 1234, 5678); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("name", dir+"/etc/link"); err != nil {
		t.Fatal(err)
	}
	src := source(t)
	src.Dir = dir
	r, err := Open(t.Context(), src)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if s := read(t, r, "cat /etc/name"); s != "hello" {
		t.Errorf("content %q", s)
	}
	if s := read(t, r, "stat /etc/name"); !strings.Contains(s, "User:  1234") || !strings.Contains(s, "Group:  5678") {
		t.Errorf("owner: %s", s)
	}
	if g := r.Guest.Disks[0]; g.Fstype != "ext4" || r.Disks[0].ReadOnly {
		t.Errorf("%v", g)
	}
	if left, _ := os.ReadDir(src.Scratch); len(left) > 0 {
		t.Errorf("the image has a name: %v", left)
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), filepath.Dir(src.MountPoint)) {
		t.Errorf("mounts are left, or %v", err)
	}
}

// TestPackOverlay packs as many layers as make mount(2)'s page too small, with a file hidden by the writable one.
func TestPackOverlay(t *testing.T) {
	needRoot(t)
	base := filepath.Join(t.TempDir(), strings.Repeat("a-long-name-", 10))
	var lowers []string
	for i := range 40 {
		dir := filepath.Join(base, fmt.Sprint(i), "fs")
		write(t, filepath.Join(dir, fmt.Sprintf("file%d", i)), fmt.Sprint(i))
		write(t, filepath.Join(dir, "same"), fmt.Sprint(i))
		lowers = append(lowers, dir)
	}
	upper, work := filepath.Join(base, "new", "fs"), filepath.Join(base, "new", "work")
	write(t, upper+"/top", "top")
	if err := os.MkdirAll(work, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(upper+"/file7", unix.S_IFCHR, 0); err != nil { // hides file7
		t.Fatal(err)
	}
	r := openRoot(t, mnt("overlay", "overlay", "workdir="+work, "upperdir="+upper, "lowerdir="+strings.Join(lowers, ":"), "index=off"))
	for name, want := range map[string]string{"top": "top", "file39": "39", "same": "0"} {
		if s := read(t, r, "cat /"+name); s != want {
			t.Errorf("%s: %q", name, s)
		}
	}
	if s := read(t, r, "cat /file7"); s != "" {
		t.Errorf("a deleted file is there: %q", s)
	}
	if left, _ := os.ReadDir(work); len(left) > 0 {
		t.Errorf("the work directory was used: %v", left)
	}
}

func TestPackDoesNotFit(t *testing.T) {
	needRoot(t)
	src := source(t)
	src.Dir = t.TempDir()
	// Zeros would take no space.
	if err := os.WriteFile(src.Dir+"/big", []byte(strings.Repeat("x", 100<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), src)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "store.disk_size") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %v", err)
	}
}

func TestPackOnAFullDisk(t *testing.T) {
	needRoot(t)
	src := source(t)
	src.Dir = t.TempDir()
	write(t, src.Dir+"/file", strings.Repeat("x", 1<<20))
	src.Scratch = t.TempDir()
	if err := unix.Mount("none", src.Scratch, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(src.Scratch, 0); err != nil {
			t.Error(err)
		}
	}()
	_, err := Open(t.Context(), src)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "no space is left in "+src.Scratch) {
		t.Errorf("error %v", err)
	}
}

func TestPackIsGivenUp(t *testing.T) {
	needRoot(t)
	src := source(t)
	src.Dir = t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, src); err == nil {
		t.Error("packed")
	}
}

func FuzzCompose(f *testing.F) {
	f.Add("format/mkdir/overlay", "overlay", "lowerdir={{ overlay 0 1 }}")
	f.Add("format/bind", "{{ mount 0 }}/x", "ro")
	f.Fuzz(func(t *testing.T, kind, src, option string) {
		r := &Root{Guest: &api.Rootfs{}}
		for range 2 {
			r.Guest.Disks = append(r.Guest.Disks, &api.Disk{})
		}
		if r.compose(mnt(kind, src, option)) != nil || r.Guest.Overlay == nil {
			return
		}
		for _, d := range append(r.Guest.Overlay.Lower, r.Guest.Overlay.Upper, r.Guest.Overlay.Work) {
			if d != nil && (d.Disk > 1 || strings.Contains("/"+d.Path+"/", "/../") || strings.HasPrefix(d.Path, "/")) {
				t.Errorf("%v", d)
			}
		}
	})
}
