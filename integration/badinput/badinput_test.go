// Package badinput gives the stack what it can't work with and checks that each ends in one line that says what is
// wrong and the way out, and that nothing is left.
package badinput

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/cubesandbox/cube/integration/stack"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }

// refused checks one line on stderr with all the words, a code other than 0, and that nothing is left.
func refused(t *testing.T, r stack.Result, words ...string) {
	t.Helper()
	msg := strings.TrimSpace(r.Stderr)
	if r.Code == 0 {
		t.Fatalf("it succeeded: %+v", r)
	}
	if strings.Contains(msg, "\n") || msg == "" {
		t.Errorf("want one line, got:\n%s", r.Stderr)
	}
	for _, w := range words {
		if !strings.Contains(msg, w) {
			t.Errorf("the message doesn't say %q: %s", w, msg)
		}
	}
	s.Eventually(t, 5*time.Second, "nothing left", func() bool { return len(s.VMLeaks()) == 0 })
}

// run is `ctr run` with flags, in a machine.
func run(t *testing.T, flags []string, cmd ...string) stack.Result {
	t.Helper()
	id := s.ID(t, "bad")
	args := append([]string{"run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube"}, flags...)
	r := s.Ctr(append(append(args, stack.Image, id), cmd...)...)
	if left := stack.CgroupLeaks(id); len(left) > 0 {
		t.Error(left)
	}
	return r
}

func TestAnnotations(t *testing.T) {
	for _, tc := range []struct {
		annotation string
		words      []string
	}{
		{"io.cube.vcpus=many", []string{"io.cube.vcpus", "many"}},
		{"io.cube.vcpus=0", []string{"io.cube.vcpus"}},
		{"io.cube.vcpus=4096", []string{"io.cube.vcpus", "4096"}},
		{"io.cube.memory=-1", []string{"io.cube.memory"}},
		{"io.cube.memory=1MiB", []string{"io.cube.memory"}},
		{"io.cube.memory=900TiB", []string{"io.cube.memory"}},
		{"io.cube.memroy=1GiB", []string{"io.cube.memroy", "unknown"}},
	} {
		t.Run(tc.annotation, func(t *testing.T) {
			refused(t, run(t, []string{"--annotation", tc.annotation}, "true"), tc.words...)
		})
	}
}

func TestCommandThatIsNotInTheImage(t *testing.T) {
	refused(t, run(t, nil, "/no/such/command"), "/no/such/command", "not found")
	refused(t, run(t, nil, "no-such-command"), "no-such-command", "not found")
}

func TestHostNetworkIsRefused(t *testing.T) {
	refused(t, run(t, []string{"--net-host"}, "true"), "network")
}

func TestImageForAnotherArchitecture(t *testing.T) {
	layer, err := random.Layer(1024, types.DockerLayer)
	if err != nil {
		t.Fatal(err)
	}
	base, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Architecture: "s390x", OS: "linux"})
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("cube.local/foreign:latest")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "foreign.tar")
	if err := tarball.WriteToFile(file, tag, img); err != nil {
		t.Fatal(err)
	}
	if r := s.Cube("image", "import", file); r.Err != nil {
		refused(t, r, "s390x") // refused at the import: as good as at the run
		return
	}
	refused(t, s.Cube("run", "--rm", "cube.local/foreign:latest", "true"), "s390x")
}

func TestImageThatIsNotThere(t *testing.T) {
	refused(t, s.Cube("run", "--rm", "127.0.0.1:1/missing:latest", "true"), "127.0.0.1:1/missing:latest")
}

func TestImportOfGarbage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "garbage.tar")
	if err := os.WriteFile(file, []byte(strings.Repeat("garbage", 4096)), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(t, s.Cube("image", "import", file), "garbage.tar")
	refused(t, s.Cube("image", "import", file+".missing"), "garbage.tar.missing")
}

func TestUnknownContainer(t *testing.T) {
	for _, args := range [][]string{{"exec", "nobody", "true"}, {"logs", "nobody"}, {"rm", "nobody"}} {
		refused(t, s.Cube(args...), "nobody")
	}
}

func TestSecondUp(t *testing.T) {
	refused(t, s.Cube("up", "-d"), "already")
}

// alone is a configuration of its own, for stacks that must not come up.
func alone(t *testing.T, text string) stack.Result {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "config.toml")
	run := fmt.Sprintf("/run/%s-bad", filepath.Base(s.Dir))
	t.Cleanup(func() { os.RemoveAll(run) })
	// The suite's own stack has the usual address of the API.
	text = fmt.Sprintf("state_dir = %q\nrun_dir = %q\n%s\n[api]\nlisten = '127.0.0.1:3001'\n", filepath.Join(dir, "state"), run, text)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	r := s.Cube("--config", file, "up", "-d")
	if r.Code == 0 {
		s.Cube("--config", file, "down")
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("a mount is left: %v", err)
	}
	// It goes with its last user, and others' mount namespaces may have copied the mount for a moment.
	s.Eventually(t, 5*time.Second, "no loop device is left", func() bool {
		loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
		return !slices.ContainsFunc(loops, func(l string) bool {
			b, _ := os.ReadFile(l)
			return strings.HasPrefix(string(b), dir)
		})
	})
	if r.Code == 0 {
		t.Fatal("it came up")
	}
	return r
}

func TestBrokenConfiguration(t *testing.T) {
	refused(t, alone(t, "[vm]\nmemori = '1GiB'\n"), "memori", "config.toml")
	refused(t, alone(t, "[vm\n"), "config.toml", "line")
}

func TestNoArtefacts(t *testing.T) {
	refused(t, alone(t, fmt.Sprintf("artefacts = %q\n", t.TempDir())), "QEMU", "make setup")
}

func TestNoGuestImage(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(s.Config.Artefacts, "qemu"), filepath.Join(dir, "qemu")); err != nil {
		t.Fatal(err)
	}
	refused(t, alone(t, fmt.Sprintf("artefacts = %q\n", dir)), "guest", "make setup")
}

func TestNoContainerd(t *testing.T) {
	refused(t, alone(t, fmt.Sprintf("artefacts = %q\nready_timeout = '2s'\n[containerd]\naddress = '/run/nobody-listens.sock'\n[store]\nsize = '1GiB'\n", s.Config.Artefacts)),
		"containerd", "/run/nobody-listens.sock")
}

func TestStoreThatDoesNotFit(t *testing.T) {
	refused(t, alone(t, fmt.Sprintf("artefacts = %q\n[store]\nsize = '900TiB'\n", s.Config.Artefacts)), "store.size")
}
