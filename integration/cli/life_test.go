package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/orchestrator/doctor"
	"github.com/cubesandbox/cube/orchestrator/health"
)

// get asks the control socket.
func get(t *testing.T, path string) (int, health.Report) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", s.Config.ControlSocket())
	}, DisableKeepAlives: true}}
	resp, err := c.Get("http://cube" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var r health.Report
	if path == "/readyz" {
		if err := json.NewDecoder(resp.Body).Decode(&r); err != nil {
			t.Fatal(err)
		}
	}
	return resp.StatusCode, r
}

// up is the pid of the `cube up` that runs.
func up(t *testing.T) int {
	t.Helper()
	_, r := get(t, "/readyz")
	return r.PID
}

// containerd is the pid of the private containerd.
func containerd(t *testing.T) int {
	t.Helper()
	found := s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
	if len(found) != 1 {
		t.Fatalf("%d containerds: %v", len(found), found)
	}
	return found[0].PID
}

func kill(t *testing.T, pid int, sig unix.Signal) {
	t.Helper()
	if sig == unix.SIGKILL || sig == unix.SIGTERM {
		s.End(t, pid, sig)
		return
	}
	if err := unix.Kill(pid, sig); err != nil {
		t.Fatalf("signal %v to process %d: %v", sig, pid, err)
	}
}

func TestSocketsAreRootsAlone(t *testing.T) {
	for _, f := range []string{s.Config.ControlSocket(), s.Config.SnapshotterSocket(), s.Config.ContainerdSocket(), s.Config.RunDir} {
		st, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm()&0o007 != 0 {
			t.Errorf("%s has mode %v", f, st.Mode())
		}
	}
}

func TestDoctorOnARunningStack(t *testing.T) {
	r := s.Cube("doctor", "--json")
	var findings []doctor.Finding
	if err := json.Unmarshal([]byte(r.Stdout), &findings); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	if r.Err != nil || doctor.Count(findings, doctor.Fail) > 0 {
		t.Errorf("%+v", r)
	}
	seen := make(map[string]doctor.Finding)
	for _, f := range findings {
		seen[f.Name] = f
	}
	for _, name := range []string{"host", "accelerator", "qemu", "guest image", "reflink", "disk", "tun", "bpf", "cgroups", "stack", "containerd", "leftovers"} {
		if seen[name].Detail == "" {
			t.Errorf("nothing about %s in %s", name, r.Stdout)
		}
	}
	if !strings.Contains(seen["stack"].Detail, fmt.Sprint(up(t))) {
		t.Errorf("%+v doesn't name the process", seen["stack"])
	}
}

// TestRemovedMeanwhile: what is removed while no `cube up` serves the snapshotter to a containerd that goes on is gone from the
// disk when the next one is ready. containerd tries that once, and again only when the next snapshot is removed. So is what was kept
// for somebody who was killed, and not for who still lives.
func TestRemovedMeanwhile(t *testing.T) {
	killed := halfImport(t)
	kill(t, killed.Process.Pid, unix.SIGKILL)
	_ = killed.Wait()
	if !leased(t) {
		t.Fatal("it leaves nothing")
	}

	disks, id := images(t), s.ID(t, "meanwhile")
	for _, args := range [][]string{
		{"container", "create", "--snapshotter", "cube", stack.Image, id},
		{"snapshots", "--snapshotter", "cube", "prepare", "cube-up"}, // that of a `cube up` that was killed
	} {
		if r := s.Ctr(args...); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	kill(t, up(t), unix.SIGKILL)
	if r := s.Ctr("container", "rm", id); r.Err != nil {
		t.Fatal(r.Err)
	}
	s.Eventually(t, 20*time.Second, "containerd to have tried", func() bool {
		log, err := os.ReadFile(filepath.Join(s.Config.LogDir(), "containerd.log"))
		return err == nil && bytes.Contains(log, []byte("snapshot garbage collection failed"))
	})
	ok(t, "up", "-d")
	s.Eventually(t, 20*time.Second, "no disk of it", func() bool { return slices.Equal(images(t), disks) })
	if leased(t) {
		t.Error("containerd is still asked to keep what nobody makes any more")
	}
	lives := halfImport(t)
	kill(t, up(t), unix.SIGTERM)
	ok(t, "up", "-d")
	if !leased(t) {
		t.Error("containerd isn't asked to keep any more what is being made")
	}
	kill(t, lives.Process.Pid, unix.SIGINT)
	_ = lives.Wait()
	if leased(t) {
		t.Error("containerd is still asked to keep what was given up")
	}
}

// images are the snapshotter's files.
func images(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.Config.SnapshotterDir(), "images"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestSandboxSurvives ends every daemon in every way, one after the other, while a container runs.
func TestSandboxSurvives(t *testing.T) {
	id := s.ID(t, "survivor")
	ok(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", "while :; do date +%s%N > /dev/shm/beat; sleep 0.1; done")
	defer func() {
		ok(t, "rm", "-f", id)
		noContainers(t)
	}()
	machine := list(t)[id].PID
	fg := s.Command("cube", "run", "--rm", "--name", id+"-fg", stack.Image, "sh", "-c", "echo up; while [ ! -e /go ]; do sleep 0.1; done; exit 4")
	out, err := fg.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := fg.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	alive := func() {
		t.Helper()
		if c := list(t)[id]; c.Status != "running" || c.PID != machine {
			t.Errorf("it was machine %d, now it is %+v", machine, c)
		}
		beat := `a=$(cat /dev/shm/beat); n=0; while [ "$a" = "$(cat /dev/shm/beat)" ]; do n=$((n+1)); [ $n -lt 50 ] || exit 1; sleep 0.1; done`
		if r := s.Cube("exec", id, "sh", "-c", beat); r.Err != nil {
			t.Errorf("its heart doesn't beat: %v", r.Err)
		}
	}
	alive()

	t.Run("containerd killed", func(t *testing.T) {
		old := containerd(t)
		kill(t, old, unix.SIGKILL)
		s.Eventually(t, 20*time.Second, "another containerd and readiness", func() bool {
			found := s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
			if len(found) != 1 || found[0].PID == old {
				return false
			}
			code, _ := get(t, "/readyz")
			return code == http.StatusOK
		})
		alive()
	})
	t.Run("containerd stopped", func(t *testing.T) {
		// A containerd that hangs makes the stack unready, not dead.
		pid := containerd(t)
		kill(t, pid, unix.SIGSTOP)
		code, r := get(t, "/readyz")
		if code != http.StatusServiceUnavailable || len(r.Missing()) != 1 || !strings.Contains(r.Missing()[0], "containerd") {
			t.Errorf("/readyz = %d, %+v", code, r)
		}
		if code, _ := get(t, "/healthz"); code != http.StatusOK {
			t.Errorf("/healthz = %d", code)
		}
		if r := s.Cube("status"); r.Code != 1 || !strings.Contains(r.Stderr, "containerd") {
			t.Errorf("%+v", r)
		}
		kill(t, pid, unix.SIGCONT)
		ok(t, "status")
	})
	t.Run("cube up killed", func(t *testing.T) {
		old, ctrd := up(t), containerd(t)
		kill(t, old, unix.SIGKILL)
		alive() // containerd goes on by itself
		ok(t, "up", "-d")
		if up(t) == old || containerd(t) != ctrd {
			t.Errorf("containerd %d wasn't adopted", ctrd)
		}
		alive()
	})
	t.Run("cube up ended", func(t *testing.T) {
		old, ctrd := up(t), containerd(t)
		kill(t, old, unix.SIGTERM)
		if stack.Runs(ctrd) {
			t.Error("its containerd goes on")
		}
		if _, err := os.Stat(s.Config.ControlSocket()); err == nil {
			t.Error("its control socket is left")
		}
		if r := s.Cube("ps"); r.Code != 1 || !strings.Contains(r.Stderr, "cube up") {
			t.Errorf("%+v", r)
		}
		ok(t, "up", "-d")
		alive()
	})
	t.Run("both killed", func(t *testing.T) {
		kill(t, up(t), unix.SIGKILL)
		kill(t, containerd(t), unix.SIGKILL)
		ok(t, "up", "-d")
		alive()
	})

	// The attached `cube run` has sat through all of that.
	s.Cube("exec", id+"-fg", "touch", "/go") // it may be killed by the end that it brings about
	_ = fg.Wait()
	if code := fg.ProcessState.ExitCode(); code != 4 {
		t.Errorf("the attached run ended with %d, want 4", code)
	}
}

// TestDownAfterKills takes a stack down of which every daemon was killed while sandboxes ran.
func TestDownAfterKills(t *testing.T) {
	ok(t, "run", "-d", "--name", s.ID(t, "orphan"), stack.Image, "sleep", "1000")
	kill(t, up(t), unix.SIGKILL)
	kill(t, containerd(t), unix.SIGKILL)
	if r := s.Cube("down", "-t", "0s"); r.Err != nil || r.Stdout+r.Stderr != "" {
		t.Errorf("%+v", r)
	}
	if leaks := s.Leaks(); len(leaks) > 0 {
		t.Errorf("left behind: %q", leaks)
	}
	if r := s.Cube("down"); r.Err != nil {
		t.Errorf("down isn't idempotent: %v", r.Err)
	}
	ok(t, "up", "-d")
	ok(t, "rm", s.ID(t, "orphan")) // its record and its disk stayed
	noContainers(t)
}

// TestExistingContainerd runs a stack in somebody else's containerd, on a host of its own.
func TestExistingContainerd(t *testing.T) {
	root, err := stack.Repository()
	if err != nil {
		t.Fatal(err)
	}
	host, err := testhost.New()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	bin := filepath.Join(root, "bin")
	dir, err := os.MkdirTemp("/var/tmp", "cube-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket, file, run := filepath.Join(dir, "c.sock"), filepath.Join(dir, "cube.toml"), "/run/"+filepath.Base(dir)
	conf := fmt.Sprintf("state_dir = %q\nrun_dir = %q\nartefacts = %q\n[containerd]\naddress = %q\n[store]\nsize = '3GiB'\ndisk_size = '1GiB'\n",
		dir+"/state", run, s.Config.Artefacts, socket)
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	cube := func(args ...string) stack.Result {
		return s.Run(host.Command(filepath.Join(bin, "cube"), append([]string{"--config", file}, args...)...), nil)
	}
	ctr := func(args ...string) stack.Result {
		return s.Run(host.Command(filepath.Join(bin, "ctr"), append([]string{"-a", socket}, args...)...), nil)
	}
	base := fmt.Sprintf("version = 4\nroot = %q\nstate = %q\ndisabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.nri.v1.nri']\n"+
		"[plugins.'io.containerd.server.v1.grpc']\naddress = %q\n[plugins.'io.containerd.server.v1.ttrpc']\naddress = %q\n",
		dir+"/root", dir+"/run", socket, socket+".ttrpc")

	stop := startContainerd(t, host, bin, dir, base)
	r := cube("up", "-d")
	if r.Code == 0 || !strings.Contains(r.Stderr, "has no plugin io.containerd.snapshotter.v1.cube") {
		t.Errorf("a containerd without the plugins: %+v", r)
	}
	stop()

	snippet := cube("up", "--print-containerd-config")
	if snippet.Err != nil || !strings.Contains(r.Stderr, snippet.Stdout) {
		t.Fatalf("the refusal must show what is missing: %+v\n%+v", r, snippet)
	}
	stop = startContainerd(t, host, bin, dir, base+snippet.Stdout)
	defer stop()
	for _, args := range [][]string{{"up", "-d"}, {"image", "import", stack.DemoArchive()}, {"run", "-d", "--name", s.ID(t, "guest"), stack.Image, "sleep", "1000"}} {
		if r := cube(args...); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	if r := ctr("run", "-d", "--snapshotter", "overlayfs", stack.Image, "neighbour", "sleep", "1000"); r.Err != nil {
		t.Fatal(r.Err)
	}
	if r := cube("down", "-t", "0s"); r.Err != nil {
		t.Error(r.Err)
	}
	tasks := ctr("task", "ls", "-q").Stdout
	if strings.Contains(tasks, s.ID(t, "guest")) || !strings.Contains(tasks, "neighbour") {
		t.Errorf("tasks after down: %q", tasks)
	}
	ctr("task", "rm", "-f", "neighbour")
	ctr("container", "rm", "neighbour")
	if r := cube("down", "--purge"); r.Err != nil {
		t.Error(r.Err)
	}
	if left, err := host.Left(); err != nil || len(left) > 0 {
		t.Errorf("left on the host: %q, %v", left, err)
	}
	if _, err := os.Stat(run); err == nil {
		t.Errorf("left: %s", run)
	}
}

// startContainerd runs a containerd of somebody else's, who has Cube's shim in the PATH.
func startContainerd(t *testing.T, host *testhost.Host, bin, dir, conf string) (stop func()) {
	t.Helper()
	file := filepath.Join(dir, "containerd.toml")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(filepath.Join(dir, "notify"))
	defer notify.Close()
	log, err := os.OpenFile(filepath.Join(dir, "containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := host.Command(filepath.Join(bin, "containerd"), "--config", file)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "NOTIFY_SOCKET="+filepath.Join(dir, "notify"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := notify.SetReadDeadline(time.Now().Add(s.Config.Timeout(30 * time.Second))); err != nil {
		t.Fatal(err)
	}
	if _, err := notify.Read(make([]byte, 100)); err != nil {
		_ = cmd.Process.Kill()
		t.Fatalf("containerd doesn't come up: %v", err)
	}
	return func() {
		_ = cmd.Process.Signal(unix.SIGTERM)
		_ = cmd.Wait()
	}
}
