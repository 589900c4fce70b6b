// Package stack runs a whole Cube of its own for tests: containerd, snapshotter, store and base snapshots in directories
// that it makes and removes, in a network namespace that stands for a host (package testhost), beside whatever else runs on
// the real one. It drives the built binaries, as a user does.
package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"

	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/config"
)

// Image is the demo image, which every stack has.
const Image = "cube.local/debian:bookworm"

// TrustedRegistry is a place for a registry on the test's internet whose templates the stack restores with their memory.
var TrustedRegistry = netip.AddrPortFrom(testhost.Server, 5000).String()

// Stack is one running stack.
type Stack struct {
	// Dir holds the configuration and the state directory.
	Dir string
	// Config is the configuration that the stack runs with.
	Config *config.Config
	// Host is where it runs.
	Host *testhost.Host

	file  string
	root  string
	store string // what the test itself has mounted for the store
}

// Main is a TestMain: it starts one stack with the demo image for all tests of a package, runs them, takes the stack
// down and fails when something of it is left. What tests need besides is prepare's. Without the built binaries it says so and runs nothing.
func Main(m *testing.M, s **Stack, prepare ...func(*Stack) error) {
	root, err := Repository()
	if err != nil {
		fmt.Println("SKIP:", err)
		return
	}
	os.Exit(run(m, root, s, prepare))
}

func run(m *testing.M, root string, s **Stack, prepare []func(*Stack) error) int {
	started := time.Now()
	st, err := Start(root)
	if err == nil {
		err = st.ImportDemo()
	}
	for _, f := range prepare {
		if err == nil {
			err = f(st)
		}
	}
	if err != nil {
		fmt.Println("start the test stack:", err)
		if st != nil {
			fmt.Print(st.Logs())
			_ = st.Stop()
		}
		return 1
	}
	fmt.Printf("test stack ready after %.1f s\n", time.Since(started).Seconds())
	*s = st
	stop := sync.OnceValue(st.Stop) // an interrupted test fails, and then both want it
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		fmt.Println("interrupted:", <-interrupted)
		if err := stop(); err != nil {
			fmt.Println("stop the test stack:", err)
		}
		os.Exit(1)
	}()
	code := m.Run()
	if code != 0 {
		fmt.Print(st.Logs())
	}
	if err := stop(); err != nil {
		fmt.Println("stop the test stack:", err)
		return 1
	}
	return code
}

// Repository is the directory above the working directory that has go.mod and, below bin/, what make build makes.
func Repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			for _, f := range []string{"cube", "containerd-shim-cube-v2", "cube-jail", "cube-share", "containerd", "ctr", "runc"} {
				if _, err := os.Stat(filepath.Join(dir, "bin", f)); err != nil {
					return "", fmt.Errorf("bin/%s isn't there; make build makes it", f)
				}
			}
			return dir, nil
		}
	}
	return "", errors.New("no go.mod above the test's directory")
}

// Start makes and starts a stack. root is the directory that holds bin/. On error the returned stack, if any, still
// has logs to show and must be stopped. extra is appended to the configuration file.
func Start(root string, extra ...string) (*Stack, error) {
	return start(root, storeSize, nil, extra...)
}

// StartOnExt4 is Start with a store where files can't share blocks: whatever is a clone elsewhere is a sparse copy.
func StartOnExt4(root string) (*Stack, error) { return start(root, "0", (*Stack).mountExt4) }

// storeSize is the size of the store, whichever it is.
const storeSize = "6GiB"

// mountExt4 has the store on an ext4 of its own, in a sparse file.
func (s *Stack) mountExt4() error {
	image, dir := filepath.Join(s.Dir, "store.ext4"), s.Config.StoreDir()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", image, strings.TrimSuffix(storeSize, "iB")).CombinedOutput(); err != nil {
		return fmt.Errorf("make %s: %w: %s", image, err, out)
	}
	if err := (&mount.Mount{Type: "ext4", Source: image, Options: []string{"loop"}}).Mount(dir); err != nil {
		return fmt.Errorf("mount %s: %w", image, err)
	}
	s.store = dir
	return nil
}

// start starts a stack whose store is mounted by the given function, or made by Cube of that size.
func start(root, size string, mountStore func(*Stack) error, extra ...string) (*Stack, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("the tests need root: use sudo")
	}
	dir, err := os.MkdirTemp("/var/tmp", "cube-test-")
	if err != nil {
		return nil, err
	}
	s := &Stack{Dir: dir, file: filepath.Join(dir, "config.toml"), root: root}
	artefacts := os.Getenv("CUBE_ARTEFACTS")
	if artefacts == "" {
		artefacts = filepath.Join(config.Default().StateDir, "artefacts")
	}
	if s.Host, err = testhost.New(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	text := strings.Join(append([]string{fmt.Sprintf(`state_dir = %q
run_dir = %q
bin_dir = %q
artefacts = %q
log_level = "debug"
[store]
size = %q
disk_size = "4GiB"
[limits.team.limited]
running = 2
[network]
dns_upstreams = [%q]
[templates]
ready_timeout = "15s"
trusted_registries = [%q]
`, filepath.Join(dir, "state"), "/run/"+filepath.Base(dir), filepath.Join(root, "bin"), artefacts, size, testhost.Resolver, TrustedRegistry)}, extra...), "\n")
	if err = os.WriteFile(s.file, []byte(text), 0o600); err == nil {
		s.Config, err = config.Load(s.file)
	}
	if err == nil && mountStore != nil {
		err = mountStore(s)
	}
	if err != nil {
		return nil, errors.Join(err, s.Host.Close(), os.RemoveAll(dir))
	}
	if r := s.Cube("up", "-d"); r.Err != nil {
		return s, fmt.Errorf("cube up: %w", r.Err)
	}
	return s, nil
}

// ImportDemo gives the stack the demo image.
func (s *Stack) ImportDemo() error {
	archive := DemoArchive()
	if _, err := os.Stat(archive); err != nil {
		return fmt.Errorf("no demo image (make setup makes it): %w", err)
	}
	if r := s.Cube("image", "import", archive); r.Err != nil {
		return fmt.Errorf("import the demo image: %w", r.Err)
	}
	return nil
}

// DemoArchive is where set-up keeps the demo image.
func DemoArchive() string { return filepath.Join(Cache(), "images", "debian-bookworm.tar") }

// Cache is where set-up keeps what it has made.
func Cache() string {
	if cache := os.Getenv("CUBE_CACHE"); cache != "" {
		return cache
	}
	return "/var/cache/cube"
}

// Stop takes the stack down, checks that nothing of it is left and removes its directory and its host.
func (s *Stack) Stop() error {
	var errs []error
	if r := s.Cube("down", "--purge"); r.Err != nil {
		errs = append(errs, fmt.Errorf("cube down --purge: %w", r.Err))
	}
	if s.store != "" {
		errs = append(errs, mount.UnmountAll(s.store, 0))
	}
	// A loop device goes with its last user, which may take a moment.
	leaks := s.Leaks()
	for end := time.Now().Add(s.Config.Timeout(20 * time.Second)); len(leaks) > 0 && time.Now().Before(end); leaks = s.Leaks() {
		time.Sleep(20 * time.Millisecond)
	}
	left, err := s.networkLeaks()
	errs = append(errs, err)
	for _, l := range append(leaks, left...) {
		errs = append(errs, errors.New("left behind: "+l))
	}
	errs = append(errs, s.Host.Close(), os.RemoveAll(s.Dir), os.RemoveAll(s.Config.RunDir))
	return errors.Join(errs...)
}

// Logs is the tail of the daemons' logs.
func (s *Stack) Logs() string {
	var b strings.Builder
	for _, name := range []string{"cube.log", "containerd.log"} {
		text, err := os.ReadFile(filepath.Join(s.Config.LogDir(), name))
		if err != nil {
			continue
		}
		lines := strings.Split(string(text), "\n")
		fmt.Fprintf(&b, "--- %s\n%s\n", name, strings.Join(lines[max(0, len(lines)-60):], "\n"))
	}
	return b.String()
}

// Result is what a command did.
type Result struct {
	Stdout, Stderr string
	Code           int
	Err            error // nil exactly when Code is 0
}

// Cube runs the cube command on this stack.
func (s *Stack) Cube(args ...string) Result { return s.Run(s.Command("cube", args...), nil) }

// Ctr runs ctr on this stack.
func (s *Stack) Ctr(args ...string) Result { return s.Run(s.Command("ctr", args...), nil) }

// Command is one of the stack's binaries, cube or ctr, ready to run on the stack's host.
func (s *Stack) Command(name string, args ...string) *exec.Cmd {
	if name == "ctr" {
		args = append([]string{"-a", s.Config.ContainerdSocket()}, args...)
	}
	cmd := s.Host.Command(filepath.Join(s.root, "bin", name), args...)
	cmd.Env = append(os.Environ(), config.FileEnv+"="+s.file,
		"CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1") // what it thinks of the host's cgroups
	return cmd
}

// Run runs a command to its end, at most two minutes (scaled).
func (s *Stack) Run(cmd *exec.Cmd, stdin []byte) Result {
	var out, errs bytes.Buffer
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Start()
	if err == nil {
		t := time.AfterFunc(s.Config.Timeout(2*time.Minute), func() { _ = cmd.Process.Kill() })
		err = cmd.Wait()
		t.Stop()
	}
	r := Result{Stdout: out.String(), Stderr: errs.String(), Err: err}
	if err != nil {
		r.Code = -1
		if cmd.ProcessState != nil {
			r.Code = cmd.ProcessState.ExitCode()
		}
		r.Err = fmt.Errorf("%w: %s", err, strings.TrimSpace(r.Stderr))
	}
	return r
}

// Name is in the ids of the stack's containers and in the paths of its daemons.
func (s *Stack) Name() string { return filepath.Base(s.Dir) }

// ID makes a container id that is this test's alone; it begins with the stack's name, by which leaks are found.
func (s *Stack) ID(t testing.TB, name string) string {
	t.Helper()
	return s.Name() + "-" + name
}

// PID is the host pid of a container's task, which is its QEMU's.
func (s *Stack) PID(t testing.TB, id string) int {
	t.Helper()
	for _, line := range strings.Split(s.Ctr("task", "ls").Stdout, "\n") {
		f := strings.Fields(line)
		if len(f) >= 2 && f[0] == id {
			pid, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("no task %s", id)
	return 0
}

// Eventually waits for what no event tells a test: a state of the host from outside (processes, files).
func (s *Stack) Eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(within))
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("not within %v: %s", within, what)
		case <-tick.C:
		}
	}
}
