package conformance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/api/types"
	"github.com/opencontainers/runtime-spec/specs-go"
)

var oomRows = []row{
	{name: "Kill", test: oomKill},
}

// oomKill: a container that takes more memory than its limit is killed, and containerd hears why before it hears that.
func oomKill(b *box) {
	limit := int64(128 << 20)
	b.change = func(s *specs.Spec) { s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit, Swap: &limit} }
	b.run(hog)
	if got := b.init.wait(); got != 137 {
		b.Errorf("status %d", got)
	}
	b.await("exit init 137")
	events := b.events()
	if oom := slices.Index(events, "oom"); oom < 0 || oom > slices.Index(events, "exit init 137") {
		b.Errorf("events %q", events)
	}
}

var layersRows = []row{
	{name: "Layers100", test: manyLayers, long: true},
}

// manyLayers: an overlay of as many disks, as the erofs snapshotter asks for it.
func manyLayers(b *box) {
	const n = 100
	if _, err := exec.LookPath("mkfs.erofs"); err != nil && !b.d.fake() {
		b.Skip("mkfs.erofs is not installed (package erofs-utils)")
	}
	dir := b.TempDir()
	upper := b.rootfs[0]
	b.rootfs = nil
	for i := range n {
		b.rootfs = append(b.rootfs, &types.Mount{Type: "erofs", Source: b.layer(dir, i), Options: []string{"ro", "loop"}})
	}
	b.rootfs = append(b.rootfs, upper, &types.Mount{Type: "format/mkdir/overlay", Source: "overlay", Options: []string{
		fmt.Sprintf("X-containerd.mkdir.path={{ mount %d }}/upper:0755", n),
		fmt.Sprintf("X-containerd.mkdir.path={{ mount %d }}/work:0755", n),
		fmt.Sprintf("lowerdir={{ overlay %d 0 }}", n-1),
		fmt.Sprintf("upperdir={{ mount %d }}/upper", n),
		fmt.Sprintf("workdir={{ mount %d }}/work", n),
	}})
	all := strings.Repeat("x", n)
	b.run(both("cat /layers/*; echo more >/layers/more", "echo", all, "0")).ends(0, all)
}

// layer makes the i-th layer: the lowest has all that a container needs, each has a file of its own.
func (b *box) layer(dir string, i int) string {
	b.Helper()
	image := filepath.Join(dir, fmt.Sprintf("layer%d.img", i))
	if b.d.fake() {
		return b.d.disk(b.T, image, 0)
	}
	root := filepath.Join(dir, fmt.Sprintf("layer%d", i))
	if i == 0 {
		var err error
		root, err = rootTree(dir, 0)
		b.must(err)
	}
	b.must(os.MkdirAll(filepath.Join(root, "layers"), 0o755))
	b.must(os.WriteFile(filepath.Join(root, "layers", fmt.Sprint(i)), []byte("x"), 0o644))
	if out, err := exec.Command("mkfs.erofs", "--quiet", image, root).CombinedOutput(); err != nil {
		b.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
	return image
}

const (
	nerdbox = "a service of nerdbox's own that containerd doesn't ask for"
	noFiles = "a fake guest has no files"
)

var mountRows = []row{
	{name: "BindMount", test: bindMount, noFake: noFiles},
}

// bindMount: directories of the host are in the guest, one to read and write and one only to read.
func bindMount(b *box) {
	dir := b.TempDir()
	b.must(writeFile(filepath.Join(dir, "in"), data(1<<20), 0o644))
	b.change = func(s *specs.Spec) {
		for dst, access := range map[string]string{"/rw": "rw", "/ro": "ro"} {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: dst, Type: "bind", Source: dir, Options: []string{"rbind", access}})
		}
	}
	p := b.run(both("cat /ro/in; echo from the guest >/rw/out; echo no >/ro/out2"))
	b.sameData(p.output(), 1<<20)
	if got := p.wait(); got != 1 {
		b.Errorf("status %d: a read-only mount was written to", got)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "out")); err != nil || string(got) != "from the guest\n" {
		b.Errorf("the guest wrote %q, %v", got, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "out2")); err == nil {
		b.Error("a read-only mount was written to")
	}
}

var otherRows = []row{
	{name: "Transfer", noFake: nerdbox, noQEMU: nerdbox},
	{name: "UnixSockets", noFake: nerdbox, noQEMU: nerdbox},
}
