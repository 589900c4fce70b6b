package stack

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	introspection "github.com/containerd/containerd/api/services/introspection/v1"
	rpc "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/snapshotter"
)

var update = flag.Bool("update", false, "write the golden files")

// holdEnv has the test binary take the lock of a run directory and keep it until its stdin ends.
const holdEnv = "CUBE_TEST_HOLD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holdEnv); dir != "" {
		l, err := acquire(&config.Config{RunDir: dir})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("held")
		_, _ = bufio.NewReader(os.Stdin).ReadByte()
		_ = l.release()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func testConfig(t *testing.T) *config.Config {
	t.Helper()
	c := config.Default()
	dir := t.TempDir()
	c.StateDir, c.RunDir, c.BinDir = filepath.Join(dir, "state"), filepath.Join(dir, "run"), filepath.Join(dir, "bin")
	if err := os.MkdirAll(c.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLockNamesItsHolder(t *testing.T) {
	cfg := testConfig(t)
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), holdEnv+"="+cfg.RunDir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "held\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}

	_, err = acquire(cfg)
	var busy *BusyError
	if !errors.As(err, &busy) || busy.PID != cmd.Process.Pid {
		t.Errorf("got %v, want one that names process %d", err, cmd.Process.Pid)
	}
	if pid, err := Running(cfg); pid != cmd.Process.Pid || err != nil {
		t.Errorf("Running = %d, %v", pid, err)
	}

	// A kill leaves nothing that is in the way.
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	in.Close()
	if pid, err := Running(cfg); pid != 0 || err != nil {
		t.Errorf("after the kill: Running = %d, %v", pid, err)
	}
	l, err := acquire(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.release(); err != nil {
		t.Error(err)
	}
}

func TestLockOfAFileThatWasRemoved(t *testing.T) {
	cfg := testConfig(t)
	l, err := acquire(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !current(l.file) {
		t.Error("the file is there")
	}
	if err := l.remove(); err != nil {
		t.Fatal(err)
	}
	if current(l.file) {
		t.Error("the file is gone")
	}
	if _, err := os.Stat(lockPath(cfg)); err == nil {
		t.Error("the file is left")
	}
	if l, err = acquire(cfg); err != nil || !current(l.file) {
		t.Errorf("another lock: %v", err)
	}
}

func TestRunningWithoutRunDir(t *testing.T) {
	if pid, err := Running(&config.Config{RunDir: t.TempDir() + "/none"}); pid != 0 || err != nil {
		t.Errorf("Running = %d, %v", pid, err)
	}
}

func TestContainerdConfig(t *testing.T) {
	t.Setenv(config.FileEnv, "/etc/cube/other.toml")
	cfg := config.Default()
	cfg.TimeoutScale = 2.5
	for _, tc := range []struct {
		name  string
		write func() ([]byte, error)
	}{
		{"private", func() ([]byte, error) { return containerdConfig(cfg) }},
		{"existing", func() ([]byte, error) { return Snippet(cfg) }},
	} {
		got, err := tc.write()
		if err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", tc.name+".toml")
		if *update {
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from %s (go test -update writes it):\n%s", tc.name, golden, got)
		}
	}
}

// TestContainerdTakesItsConfig has the real containerd read what is written for it.
func TestContainerdTakesItsConfig(t *testing.T) {
	bin := realContainerd(t)
	cfg := testConfig(t)
	conf, err := containerdConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(containerdConfigPath(cfg), conf, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(bin, "--config", containerdConfigPath(cfg), "config", "dump").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{
		"address = '" + cfg.ContainerdSocket() + "'",
		"default = ['cube-diff', 'walking']",
		"address = '" + cfg.SnapshotterSocket() + "'",
		"root = '" + cfg.StateDir + "/containerd'",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("containerd's view lacks %s", want)
		}
	}
	for _, word := range []string{"unknown", "warning"} {
		if strings.Contains(string(out), word) {
			t.Errorf("containerd complains: %s", out)
		}
	}
}

func realContainerd(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{os.Getenv("CUBE_BIN"), "../../bin"} {
		if bin, err := exec.LookPath(filepath.Join(dir, "containerd")); dir != "" && err == nil {
			abs, err := filepath.Abs(bin)
			if err != nil {
				t.Fatal(err)
			}
			return abs
		}
	}
	t.Skip("bin/containerd isn't there; make build makes it")
	return ""
}

func TestLongRunDirHasShimSocketsElsewhere(t *testing.T) {
	cfg := config.Default()
	cfg.RunDir = "/run/" + strings.Repeat("x", 40)
	conf, err := containerdConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(conf), "socket_dir") {
		t.Errorf("containerd refuses a socket_dir of more than %d bytes:\n%s", maxShimSocketDir, conf)
	}
}

// TestFinishDeletions: of bundles only those go that containerd was removing.
func TestFinishDeletions(t *testing.T) {
	cfg := testConfig(t)
	for _, root := range []string{ContainerdState(cfg), containerdRoot(cfg)} {
		tasks := filepath.Join(root, "io.containerd.runtime.v2.task", "default")
		for _, name := range []string{".half", "whole"} {
			if err := os.MkdirAll(filepath.Join(tasks, name, "cube"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if err := finishDeletions(cfg); err != nil {
				t.Fatal(err)
			}
		}
		if left, err := filepath.Glob(filepath.Join(tasks, "*")); err != nil || len(left) != 1 || filepath.Base(left[0]) != "whole" {
			t.Errorf("%v, %v", left, err)
		}
	}
}

func TestCheckVersion(t *testing.T) {
	for version, ok := range map[string]bool{
		"2.4.2+unknown": true, "v2.3.0": true, "2.3.0-rc.1": true, "3.0.0": true, "2.10.0": true,
		"1.6.20~ds1": false, "v1.7.27": false, "2.2.9": false, "": false, "head": false,
	} {
		if err := checkVersion(version); (err == nil) != ok {
			t.Errorf("%q: %v", version, err)
		}
	}
}

func TestMissingPlugin(t *testing.T) {
	cfg := config.Default()
	at := map[string]string{"address": cfg.SnapshotterSocket()}
	sn := func(exports map[string]string, err *rpc.Status) *introspection.Plugin {
		return &introspection.Plugin{Type: "io.containerd.snapshotter.v1", ID: snapshotter.Name, Exports: exports, InitErr: err}
	}
	differ := &introspection.Plugin{Type: "io.containerd.differ.v1", ID: differName, Exports: at}
	other := &introspection.Plugin{Type: "io.containerd.snapshotter.v1", ID: "overlayfs"}
	for _, tc := range []struct {
		name, want string
		have       []*introspection.Plugin
	}{
		{"all there", "", []*introspection.Plugin{other, differ, sn(at, nil)}},
		{"nothing", "has no plugin io.containerd.snapshotter.v1.cube", []*introspection.Plugin{other}},
		{"no differ", "has no plugin io.containerd.differ.v1.cube-diff", []*introspection.Plugin{sn(at, nil)}},
		{"failed", "failed: no such socket", []*introspection.Plugin{differ, sn(at, &rpc.Status{Message: "no such socket"})}},
		{"another stack's", "is at /run/other.sock, not /run/cube/snapshotter.sock", []*introspection.Plugin{differ, sn(map[string]string{"address": "/run/other.sock"}, nil)}},
	} {
		if got := missing(cfg, tc.have); (tc.want == "") != (got == "") || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestLogTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if got := logTail(path, 0); !strings.Contains(got, "nothing") {
		t.Errorf("without a file: %q", got)
	}
	old := strings.Repeat("old\n", 10)
	if err := os.WriteFile(path, []byte(old+"one\n\ntwo\nthree\n"+strings.Repeat("x", 1000)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "two | three | " + strings.Repeat("x", tailWidth) + " (" + path + ")"
	if got := logTail(path, int64(len(old))); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := logTail(path, size(path)); !strings.Contains(got, "nothing") {
		t.Errorf("what an earlier life wrote is shown: %q", got)
	}
}

func TestFindProcessesAndStop(t *testing.T) {
	word := fmt.Sprintf("--cube-test-%d", os.Getpid())
	match := func(argv []string) bool { return len(argv) > 0 && argv[len(argv)-1] == word }
	if found, err := findProcesses(match); len(found) != 0 || err != nil {
		t.Fatalf("found %v, %v", found, err)
	}
	// It ignores SIGTERM, so that stop has to kill it, and has no children, which begin with the same command line.
	cmd := exec.Command("sh", "-c", "trap '' TERM; echo; read x", "sh", word)
	if _, err := cmd.StdinPipe(); err != nil { // never written to
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	found, err := findProcesses(match)
	if err != nil || len(found) != 1 || found[0].pid != cmd.Process.Pid {
		t.Fatalf("found %+v, %v; want process %d", found, err, cmd.Process.Pid)
	}
	p := found[0]
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.stop(ctx); err != nil {
		t.Fatal(err)
	}
	p.close()
}

func TestRestartDelays(t *testing.T) {
	var got []time.Duration
	for n := 1; n <= maxRestarts; n++ {
		got = append(got, restartDelay(n))
	}
	want := []time.Duration{0, firstBackoff, 2 * firstBackoff, 4 * firstBackoff, 8 * firstBackoff}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	now := time.Now()
	if left := recent([]time.Time{now.Add(-restartWindow - time.Second), now}); len(left) != 1 {
		t.Errorf("an end of long ago still counts: %v", left)
	}
}
