package snapshotter

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/testfs"
)

const testImage = "cube.test/app:1"

// TestContainerd has a real containerd unpack an image with the snapshotter and run it with runc.
func TestContainerd(t *testing.T) {
	bin, err := filepath.Abs("../bin")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"containerd", "ctr", "containerd-shim-runc-v2", "runc"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			t.Skipf("%v: `make setup` builds it", err)
		}
	}
	dir := testfs.XFS(t, xfsSize)
	cfg := testConfig(t, dir)
	cfg.RunDir = t.TempDir()
	_, stop, err := serve(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}()
	ctr := startContainerd(t, bin, cfg.SnapshotterSocket())
	archive := ociArchive(t)

	// Both ways that clients import: containerd's transfer service, and the client itself.
	for ns, flag := range map[string]string{"default": "--local=false", "other": "--local"} {
		ctr.ok("-n", ns, "image", "import", flag, "--snapshotter", Name, archive)
		if got := ctr.ok("-n", ns, "run", "--rm", "--snapshotter", Name, testImage, "look"); got != "[/app /etc /etc/new /etc/replaced=2 /kept /opaque /opaque/only]\n" {
			t.Errorf("%s: the container sees %s", ns, got)
		}
	}
	// The image's annotation sizes its disk and, so, its containers'.
	ctr.ok("run", "--snapshotter", Name, testImage, "c1", "/app", "write", "/written")
	mounts := ctr.ok("snapshots", "--snapshotter", Name, "mounts", "/nowhere", "c1")
	fields := strings.Fields(mounts)
	if len(fields) < 4 || fields[2] != "ext4" {
		t.Fatalf("mounts of the container: %s", mounts)
	}
	img := fields[3]
	if st, err := os.Stat(img); err != nil || st.Size() != 512<<20 {
		t.Fatalf("the disk %s: %v, %v", img, st, err)
	}

	// A snapshot that only runc wrote is compared by containerd's own service, and can be committed.
	diff := ctr.ok("snapshots", "--snapshotter", Name, "diff", "c1")
	if names := tarNames(t, diff); !strings.Contains(names, "written") || strings.Contains(names, "kept") {
		t.Errorf("the container's difference is %s", names)
	}
	mark(t, img)
	if out := ctr.fails("snapshots", "--snapshotter", Name, "diff", "c1"); !strings.Contains(out, guestmark.Refusal) {
		t.Errorf("diff of what a guest has written: %s", out)
	}
	if out := ctr.fails("snapshots", "--snapshotter", Name, "commit", "c1-committed", "c1"); !strings.Contains(out, guestmark.Refusal) {
		t.Errorf("commit of what a guest has written: %s", out)
	}
	if out := ctr.fails("run", "--snapshotter", Name, "--snapshotter-label", SizeLabel+"=lots", testImage, "c2"); !strings.Contains(out, "is not a size") {
		t.Errorf("nonsense for a size: %s", out)
	}

	ctr.ok("container", "rm", "c1")
	for _, ns := range []string{"default", "other"} {
		ctr.ok("-n", ns, "image", "rm", "--sync", testImage)
	}
	if left := files(t, filepath.Join(cfg.SnapshotterDir(), "images")); len(left) != 0 {
		t.Errorf("images left: %v", left)
	}
}

// ctr is a command line client of a running containerd.
type ctr struct {
	t    *testing.T
	bin  string
	sock string
}

func (c ctr) run(args ...string) (stdout, all string, err error) {
	var out, errs bytes.Buffer
	cmd := exec.Command(filepath.Join(c.bin, "ctr"), append([]string{"-a", c.sock}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), out.String() + errs.String(), err
}

func (c ctr) ok(args ...string) (stdout string) {
	c.t.Helper()
	stdout, all, err := c.run(args...)
	if err != nil {
		c.t.Fatalf("ctr %s: %v: %s", strings.Join(args, " "), err, all)
	}
	return stdout
}

func (c ctr) fails(args ...string) (output string) {
	c.t.Helper()
	_, all, err := c.run(args...)
	if err == nil {
		c.t.Errorf("ctr %s succeeds: %s", strings.Join(args, " "), all)
	}
	return all
}

// startContainerd starts a containerd that has the snapshotter and the diff service on the socket.
func startContainerd(t *testing.T, bin, socket string) ctr {
	t.Helper()
	dir := t.TempDir()
	shims, err := os.MkdirTemp("", "s") // containerd wants a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(shims) })
	c := ctr{t: t, bin: bin, sock: filepath.Join(dir, "c.sock")}
	config := fmt.Sprintf(`version = 4
root = '%[1]s/root'
state = '%[1]s/state'
disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime',
  'io.containerd.podsandbox.controller.v1.podsandbox', 'io.containerd.nri.v1.nri']
[debug]
level = 'warn'
[plugins.'io.containerd.server.v1.grpc']
address = '%[2]s'
[plugins.'io.containerd.server.v1.ttrpc']
address = '%[2]s.ttrpc'
[plugins.'io.containerd.internal.v1.opt']
path = '%[1]s/opt'
[plugins.'io.containerd.shim.v1.manager']
socket_dir = '%[4]s'
[plugins.'io.containerd.service.v1.diff-service']
default = ['cube-diff', 'walking']
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = 'linux/amd64'
snapshotter = 'cube'
differ = 'walking'
[proxy_plugins.cube]
type = 'snapshot'
address = '%[3]s'
[proxy_plugins.cube-diff]
type = 'diff'
address = '%[3]s'
`, dir, c.sock, socket, shims)
	file := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(filepath.Join(bin, "containerd"), "--config", file)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("containerd: %v", err)
		}
		if t.Failed() {
			t.Logf("containerd's log: %s", log.String())
		}
	})
	cl, err := client.New(c.sock, client.WithTimeout(testConfig(t, dir).Timeout(30*time.Second)))
	if err != nil {
		t.Fatalf("containerd doesn't come up: %v", err)
	}
	defer cl.Close()
	if ok, err := cl.IsServing(context.Background()); err != nil || !ok {
		t.Fatalf("containerd doesn't serve: %v", err)
	}
	return c
}

// program is what the image runs: it lists the root, or writes a file.
const program = `package main

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "write" {
		if err := os.WriteFile(os.Args[2], []byte("written"), 0o644); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	var seen []string
	fs.WalkDir(os.DirFS("/"), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case path == "dev" || path == "proc" || path == "sys" || path == "run":
			return fs.SkipDir
		case path == ".":
			return nil
		case path == "etc/replaced":
			b, _ := os.ReadFile("/" + path)
			path += "=" + string(b)
		}
		seen = append(seen, "/"+path)
		return err
	})
	fmt.Println("[" + strings.Join(seen, " ") + "]")
}
`

// ociArchive is an image of three layers, with files that are replaced, deleted, and hidden with their directory. An
// annotation of its first layer makes its disk 512 MiB.
func ociArchive(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	src, app := filepath.Join(dir, "main.go"), filepath.Join(dir, "app")
	if err := os.WriteFile(src, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", app, src)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the image's program: %v: %s", err, out)
	}
	exe, err := os.ReadFile(app)
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.Append(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON),
		mutate.Addendum{Layer: layer(t, "app", string(exe), "kept", "1", "etc/replaced", "1", "etc/deleted", "1", "opaque/hidden", "1"), Annotations: map[string]string{SizeLabel: "512MiB"}},
		mutate.Addendum{Layer: layer(t, "etc/replaced", "2", "etc/.wh.deleted", "", "opaque/.wh..wh..opq", "", "opaque/only", "2")},
		mutate.Addendum{Layer: layer(t, "etc/new", "3")},
	)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	conf.Architecture, conf.OS = "amd64", "linux"
	conf.Config.Entrypoint = []string{"/app"}
	if img, err = mutate.ConfigFile(img, conf); err != nil {
		t.Fatal(err)
	}
	path, err := layout.Write(filepath.Join(dir, "layout"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(img, layout.WithAnnotations(map[string]string{"io.containerd.image.name": testImage})); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "app.tar")
	if out, err := exec.Command("tar", "-C", string(path), "-cf", archive, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return archive
}

// layer is a layer of files, given as names and contents in turn.
func layer(t *testing.T, files ...string) v1.Layer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i < len(files); i += 2 {
		h := &tar.Header{Name: files[i], Mode: 0o755, Size: int64(len(files[i+1])), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, files[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// tarNames are the names in a tar archive, which may be compressed.
func tarNames(t *testing.T, archive string) string {
	t.Helper()
	cmd := exec.Command("tar", "-tzf", "-")
	cmd.Stdin = strings.NewReader(archive)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tar: %v", err)
	}
	return string(out)
}
