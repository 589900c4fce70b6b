package conformance

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// applets are the busybox commands that the guest's programs use.
var applets = strings.Fields("sh cat echo sleep dd date stty readlink nc nslookup")

// images makes root disks: ext4 images with busybox and /data, whose content every reader can tell.
type images struct {
	dir  string
	mu   sync.Mutex
	made map[int]string // by size of the data, in MiB
}

// data is what the file /data in the guest, and the fake's program of that name, consist of.
func data(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), n) }

// template makes the image, once.
func (im *images) template(mib int) (string, error) {
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.made[mib] != "" {
		return im.made[mib], nil
	}
	root, err := rootTree(im.dir, mib)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(root)
	image := filepath.Join(im.dir, fmt.Sprintf("root-%d.img", mib))
	if out, err := exec.Command("mkfs.ext4", "-q", "-E", "root_owner=0:0", "-d", root, image, fmt.Sprintf("%dM", mib+24)).CombinedOutput(); err != nil {
		return "", fmt.Errorf("mkfs.ext4: %w: %s", err, out)
	}
	if im.made == nil {
		im.made = map[int]string{}
	}
	im.made[mib] = image
	return image, nil
}

// rootTree makes the directory that becomes the image.
func rootTree(dir string, mib int) (root string, err error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return "", fmt.Errorf("busybox is not installed (package busybox-static): %w", err)
	}
	if root, err = os.MkdirTemp(dir, "root-"); err != nil {
		return "", err
	}
	for _, d := range []string{"bin", "dev", "etc", "proc", "run", "sys", "tmp"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			return "", err
		}
	}
	in, err := os.Open(busybox)
	if err != nil {
		return "", err
	}
	defer in.Close()
	for file, from := range map[string]io.Reader{"bin/busybox": in, "data": data(int64(mib) << 20)} {
		if err := writeFile(filepath.Join(root, file), from, 0o755); err != nil {
			return "", err
		}
	}
	for _, a := range applets {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", a)); err != nil {
			return "", err
		}
	}
	return root, nil
}

func writeFile(path string, from io.Reader, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, from); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// disk is a new root disk for one container, with that much data. A fake guest doesn't look at it.
func (d *daemon) disk(t *testing.T, path string, mib int) string {
	t.Helper()
	if d.fake() {
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<20)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	template, err := d.images.template(mib)
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(template)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := writeFile(path, in, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
