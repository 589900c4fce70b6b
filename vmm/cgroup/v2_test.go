package cgroup_test

import (
	"context"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
)

// TestV2 runs this package's tests in a guest that has cgroup v2 and nothing else, since a host has either that or v1.
func TestV2(t *testing.T) {
	cfg := testguest.Config(t)
	t.Cleanup(testguest.Remove)
	root := t.TempDir()
	cmd := exec.Command("go", "test", "-c", "-o", filepath.Join(root, "test"), ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the tests: %v: %s", err, out)
	}
	for _, tool := range []string{"sh", "sleep", "dd"} {
		install(t, root, tool)
	}
	for _, d := range []string{"tmp", "proc", "sys", "dev"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	image := filepath.Join(t.TempDir(), "image")
	if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", "-d", root, image, "64M").CombinedOutput(); err != nil {
		t.Fatalf("mke2fs: %v: %s", err, out)
	}
	disk, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()

	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(3*time.Minute))
	defer cancel()
	l := base.NewLauncher(cfg, func(_ context.Context, agent net.Conn) error {
		_, err := testguest.Talk(agent).Do(cfg, "ping")
		return err
	}, slog.New(slog.DiscardHandler))
	dir := filepath.Join(cfg.VMDir(), "v2")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := l.Launch(ctx, vmm.Request{ID: "v2", Dir: dir, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Root: disk})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		if err := m.Stop(ctx); err != nil {
			t.Error(err)
		}
	}()
	quoted, err := testguest.Talk(m.Agent()).Do(cfg, "run root /test -test.v -test.skip=TestV2")
	if err != nil {
		t.Fatal(strings.ReplaceAll(err.Error(), `\n`, "\n"))
	}
	out, err := strconv.Unquote(quoted)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("in the guest:\n%s", out)
	for _, want := range []string{"TestLimits", "TestSetCPUs", "TestMemoryHogDies", "TestRemoveKills", "TestLeftoverIsReplaced", "TestRemoveV2"} {
		if !strings.Contains(out, "--- PASS: "+want) {
			t.Errorf("%s did not pass in the guest", want)
		}
	}
}

var library = regexp.MustCompile(`/\S+`)

// install copies one of the host's programs with its libraries.
func install(t *testing.T, root, tool string) {
	t.Helper()
	path, err := exec.LookPath(tool)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", path, err)
	}
	copyFile(t, path, filepath.Join(root, "bin", tool))
	for _, lib := range library.FindAllString(string(out), -1) {
		copyFile(t, lib, filepath.Join(root, lib))
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
}
