package guestimage

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"

	"github.com/cubesandbox/cube/vmm/artefact"
)

const release = "6.1.0-1-test"

// packages lays out what the unpacked and depmodded Debian packages hold: every module that is asked for by name, two
// more that are offered, one that is withheld, a driver that nobody asks for, and one wanted module built in.
func packages(t *testing.T) Input {
	t.Helper()
	root := t.TempDir()
	mods := filepath.Join("lib/modules", release)
	var dep strings.Builder
	names := map[string]string{ // module → its dependencies as depmod writes them
		"kernel/drivers/virtio/virtio_ring.ko": "",
		"kernel/drivers/virtio/virtio.ko":      "kernel/drivers/virtio/virtio_ring.ko",
		"kernel/fs/jbd2/jbd2.ko":               "",
		"kernel/fs/fuse/fuse.ko":               "",
		"kernel/fs/xfs/xfs.ko":                 "kernel/lib/libcrc32c.ko",
		"kernel/lib/libcrc32c.ko":              "",
		"kernel/fs/ocfs2/ocfs2.ko":             "",
		"kernel/drivers/gpu/i915.ko":           "",
	}
	for _, m := range slices.Concat(bootModules, offeredModules) {
		switch m {
		case "af_packet": // built in
		case "ext4":
			names["kernel/fs/ext4/ext4.ko"] = "kernel/fs/jbd2/jbd2.ko"
		case "virtio_mmio", "virtio_net":
			names["kernel/drivers/x/"+m+".ko"] = "kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko"
		default:
			names["kernel/drivers/x/"+m+".ko"] = ""
		}
	}
	for _, file := range slices.Sorted(maps.Keys(names)) {
		dep.WriteString(file + ": " + names[file] + "\n")
		write(t, filepath.Join(root, mods, file), "content of "+file)
	}
	write(t, filepath.Join(root, mods, "modules.dep"), dep.String())
	write(t, filepath.Join(root, mods, "modules.builtin"), "kernel/net/packet/af_packet.ko\n")
	write(t, filepath.Join(root, mods, "modules.alias"), "# Aliases\nalias fs-xfs xfs\nalias fs-ocfs2 ocfs2\nalias char-major-10-229 fuse\n")
	write(t, filepath.Join(root, mods, "modules.softdep"), "softdep xfs pre: crc32c\nsoftdep i915 pre: x\n")
	write(t, filepath.Join(root, "boot/vmlinuz-"+release), "a kernel")
	write(t, filepath.Join(root, "usr/bin/crun"), "#!not an ELF file, so it needs no libraries")
	write(t, filepath.Join(root, "agent"), "#!nor is this")
	write(t, filepath.Join(root, "envd"), "#!nor this")
	return Input{
		Release: release, Kernel: artefact.Sysroot(root), Crun: artefact.Sysroot(root), Agent: filepath.Join(root, "agent"),
		Envd:     filepath.Join(root, "envd"),
		Packages: map[string]string{"crun": "1"},
	}
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPublish(t *testing.T) {
	in := packages(t)
	parent := t.TempDir()
	dir, err := Publish(parent, in)
	if err != nil {
		t.Fatal(err)
	}
	m, err := artefact.ReadManifest(filepath.Join(parent, artefact.Current))
	if err != nil {
		t.Fatal(err)
	}
	agent, err := artefact.FileDigest(in.Agent)
	if err != nil {
		t.Fatal(err)
	}
	if m.Kernel != release || m.Agent != agent || m.Packages["crun"] != "1" {
		t.Errorf("unexpected manifest %+v", m)
	}
	for _, f := range []string{Kernel, Initramfs, Modules} {
		if got, err := artefact.FileDigest(filepath.Join(dir, f)); err != nil || got != m.Files[f] {
			t.Errorf("%s: digest %s (%v), in the manifest %s", f, got, err, m.Files[f])
		}
	}

	// The same input at another time, in another place.
	in2 := packages(t)
	again, err := Publish(t.TempDir(), in2)
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Base(again) != filepath.Base(dir) {
		t.Error("the same input gave another digest")
	}
	write(t, in2.Agent, "#!another agent")
	other, err := Publish(t.TempDir(), in2)
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Base(other) == filepath.Base(dir) {
		t.Error("another agent gave the same digest")
	}
}

func TestInitramfs(t *testing.T) {
	in := packages(t)
	dir, err := Publish(t.TempDir(), in)
	if err != nil {
		t.Fatal(err)
	}
	files := readCPIO(t, filepath.Join(dir, Initramfs))
	for at, mode := range map[string]cpio.FileMode{
		"init":          cpio.TypeReg | 0o755,
		"usr/bin/crun":  cpio.TypeReg | 0o644,
		"sbin/modprobe": cpio.TypeSymlink | 0o777,
		"proc":          cpio.TypeDir | 0o755,
		"sys":           cpio.TypeDir | 0o755,
		"dev":           cpio.TypeDir | 0o755,
		"run":           cpio.TypeDir | 0o755,
		"tmp":           cpio.TypeDir | cpio.ModeSticky | 0o777,
	} {
		if f, ok := files[at]; !ok || f.Mode != mode {
			t.Errorf("%s: mode %v (there: %v), want %v", at, f.Mode, ok, mode)
		}
	}
	if got := files["sbin/modprobe"].Linkname; got != "/init" {
		t.Errorf("modprobe links to %q", got)
	}
	var loaded []string
	for at := range strings.Lines(files["etc/cube/boot-modules"].content) {
		at = strings.TrimSpace(at)
		name := moduleName(at)
		f, ok := files[strings.TrimPrefix(at, "/")]
		if !ok || !strings.HasPrefix(f.content, "content of kernel/") || !strings.HasSuffix(f.content, filepath.Base(at)) {
			t.Errorf("%s is listed but not there with its content", at)
		}
		loaded = append(loaded, name)
	}
	for _, pair := range [][2]string{{"virtio_ring", "virtio"}, {"virtio", "virtio_mmio"}, {"jbd2", "ext4"}, {"crc32c_generic", "ext4"}} {
		if a, b := slices.Index(loaded, pair[0]), slices.Index(loaded, pair[1]); a < 0 || a > b {
			t.Errorf("%s must be loaded before %s: %v", pair[0], pair[1], loaded)
		}
	}
	if slices.Contains(loaded, "af_packet") {
		t.Error("a module that is built in is listed")
	}
}

// TestBuiltIn packs a kernel that was built without modules.
func TestBuiltIn(t *testing.T) {
	in := packages(t)
	var builtin strings.Builder
	for _, m := range bootModules {
		fmt.Fprintf(&builtin, "kernel/drivers/x/%s.ko\n", m)
	}
	tree := filepath.Join(string(in.Kernel), "lib/modules", release)
	remove(t, filepath.Join(tree, "kernel"))
	write(t, filepath.Join(tree, "modules.builtin"), builtin.String())
	for _, f := range []string{"modules.dep", "modules.alias", "modules.softdep"} {
		write(t, filepath.Join(tree, f), "")
	}
	dir, err := Publish(t.TempDir(), in)
	if err != nil {
		t.Fatal(err)
	}
	files := readCPIO(t, filepath.Join(dir, Initramfs))
	if list, ok := files["etc/cube/boot-modules"]; !ok || list.content != "" {
		t.Errorf("the list of boot modules is %q (there: %v), want it empty", list.content, ok)
	}
	for at := range files {
		if strings.HasSuffix(at, ".ko") {
			t.Errorf("%s is in the initramfs", at)
		}
	}
	// The guest's modprobe finds what is built in, and files that name nothing else.
	for file, want := range map[string]string{"modules.builtin": builtin.String(), "modules.dep": "", "modules.alias": "", "modules.softdep": ""} {
		if got := debugfs(t, filepath.Join(dir, Modules), file); got != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}

	short := strings.Replace(builtin.String(), "kernel/drivers/x/virtio_console.ko\n", "", 1)
	write(t, filepath.Join(tree, "modules.builtin"), short)
	if _, err := Publish(t.TempDir(), in); err == nil || !strings.Contains(err.Error(), "has no module virtio_console") {
		t.Errorf("without a driver that booting takes: %v", err)
	}
}

type entry struct {
	cpio.Header
	content string
}

func readCPIO(t *testing.T, file string) map[string]entry {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]entry{}
	seen := map[string]bool{".": true}
	for r := cpio.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if !seen[filepath.Dir(h.Name)] {
			t.Errorf("%s comes before its directory, so the kernel would drop it", h.Name)
		}
		if h.Uid != 0 || h.Guid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s has owner %d:%d, time %v", h.Name, h.Uid, h.Guid, h.ModTime)
		}
		seen[h.Name] = true
		out[h.Name] = entry{*h, string(b)}
	}
}

func TestModulesImage(t *testing.T) {
	dir, err := Publish(t.TempDir(), packages(t))
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, Modules)
	if got := debugfs(t, image, "kernel/fs/xfs/xfs.ko"); got != "content of kernel/fs/xfs/xfs.ko" {
		t.Errorf("xfs.ko has content %q", got)
	}
	dep := debugfs(t, image, "modules.dep")
	for name, want := range map[string]bool{
		"kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko": true, "kernel/fs/fuse/fuse.ko:": true, "kernel/fs/ext4/ext4.ko:": true,
		"kernel/fs/ocfs2/": false, "i915": false,
	} {
		if strings.Contains(dep, name) != want {
			t.Errorf("modules.dep has %q: %v, want %v:\n%s", name, !want, want, dep)
		}
	}
	if got := debugfs(t, image, "modules.alias"); got != "alias fs-xfs xfs\nalias char-major-10-229 fuse\n" {
		t.Errorf("modules.alias is %q", got)
	}
	if got := debugfs(t, image, "modules.softdep"); got != "softdep xfs pre: crc32c\n" {
		t.Errorf("modules.softdep is %q", got)
	}
	if got := debugfs(t, image, "modules.builtin"); got != "kernel/net/packet/af_packet.ko\n" {
		t.Errorf("modules.builtin is %q", got)
	}
}

// debugfs reads a file out of an ext4 image.
func debugfs(t *testing.T, image, file string) string {
	t.Helper()
	tool, err := exec.LookPath("debugfs")
	if err != nil {
		t.Skip("debugfs (package e2fsprogs) is not here:", err)
	}
	var out, msgs bytes.Buffer
	cmd := exec.Command(tool, "-R", "cat /"+file, image)
	cmd.Stdout, cmd.Stderr = &out, &msgs
	if err := cmd.Run(); err != nil || strings.Contains(msgs.String(), "not found") {
		t.Fatalf("debugfs: %v: %s", err, msgs.String())
	}
	return out.String()
}

func TestBadInput(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		spoil      func(t *testing.T, in *Input)
	}{
		{"no depmod", "depmod makes it", func(t *testing.T, in *Input) {
			remove(t, filepath.Join(string(in.Kernel), "lib/modules", release, "modules.dep"))
		}},
		{"no kernel", "vmlinuz", func(t *testing.T, in *Input) { remove(t, filepath.Join(string(in.Kernel), "boot/vmlinuz-"+release)) }},
		{"no crun", "crun", func(t *testing.T, in *Input) { remove(t, filepath.Join(string(in.Crun), CrunPath)) }},
		{"no daemon", "the daemon for containers is missing", func(t *testing.T, in *Input) { remove(t, in.Envd) }},
		{"no agent", "the agent is missing", func(t *testing.T, in *Input) { remove(t, in.Agent) }},
		{"broken modules.dep", "has no colon", func(t *testing.T, in *Input) {
			write(t, filepath.Join(string(in.Kernel), "lib/modules", release, "modules.dep"), "nonsense\n")
		}},
		{"a module is missing", "has no module crc32c_generic", func(t *testing.T, in *Input) {
			write(t, filepath.Join(string(in.Kernel), "lib/modules", release, "modules.dep"), "kernel/fs/fuse/fuse.ko:\n")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := packages(t)
			tc.spoil(t, &in)
			parent := t.TempDir()
			_, err := Publish(parent, in)
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v, want a line with %q", err, tc.want)
			}
			left, err := filepath.Glob(filepath.Join(parent, "*"))
			if err != nil || slices.ContainsFunc(left, func(f string) bool { return filepath.Base(f) != ".lock" }) {
				t.Fatal("left behind:", left, err)
			}
		})
	}
}

// TestDynamicAgent gives the packer an agent that the guest could not start.
func TestDynamicAgent(t *testing.T) {
	in := packages(t)
	in.Agent = "/bin/sh"
	if _, err := os.Stat(in.Agent); errors.Is(err, fs.ErrNotExist) {
		t.Skip("no /bin/sh")
	}
	if _, err := Publish(t.TempDir(), in); err == nil || !strings.Contains(err.Error(), "CGO_ENABLED=0") {
		t.Fatalf("got %v, want a refusal that says CGO_ENABLED=0", err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}
