package snapshot_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Who uses a snapshot is known until it is over, however it ends; and so long its space isn't free, although it is deleted.
func TestUsers(t *testing.T) {
	s := newShelf(t)
	s.save(t, "one")
	o, err := s.Open("one", "here")
	if err != nil {
		t.Fatal(err)
	}
	cmd := helper(t, s.cfg, "use")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has it open
		t.Fatal(err)
	}
	users, err := s.Delete("one")
	want := []snapshot.User{{Name: "here", PID: os.Getpid()}, {Name: "there", PID: cmd.Process.Pid}}
	if err != nil || !slices.Equal(users, want) {
		t.Errorf("users %v, want %v, %v", users, want, err)
	}
	if _, err := s.Open("one", "late"); !errdefs.IsNotFound(err) {
		t.Errorf("got %v", err)
	}
	held, err := o.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(held.Release(), o.Close(), cmd.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left, err := s.Lingering(); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(s.cfg.RunDir, "snapshots", "*", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// helperEnv makes the test binary a process that works on the store of a configuration.
const helperEnv = "CUBE_TEST_SNAPSHOT"

func helper(t *testing.T, cfg *config.Config, what string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestHelper$")
	cmd.Env = append(os.Environ(), helperEnv+"="+what, "CUBE_TEST_CONFIG="+encode(t, cfg))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// TestHelper is that process.
func TestHelper(t *testing.T) {
	what := os.Getenv(helperEnv)
	if what == "" {
		t.Skip("for other tests")
	}
	var cfg config.Config
	if err := json.Unmarshal([]byte(os.Getenv("CUBE_TEST_CONFIG")), &cfg); err != nil {
		t.Fatal(err)
	}
	s := &shelf{snapshot.New(&cfg, slog.New(slog.DiscardHandler)), &cfg}
	die := func(p string) {
		if p == what {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	*snapshot.Killpoint = die
	switch what {
	case "use":
		o, err := s.Open("one", "there")
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		fmt.Println("open")
		select {}
	case "hidden":
		_, err := s.Delete("old")
		t.Fatal("not killed", err)
	case "half imported", "imported":
		*snapshot.Killpoint = func(p string) { die(map[string]string{"published": "imported"}[p]) }
		info, err := s.Inspect("old")
		if err != nil {
			t.Fatal(err)
		}
		err = s.carry(t, "old", "new", info.Foreign(), func(file string, n int64, chunk []byte, put snapshot.Put) error {
			defer die("half imported")
			return put(file, n, chunk)
		})
		t.Fatal("not killed", err)
	}
	_, err := s.Save(t.Context(), "new", paper{text: "new"}, &rest{freeze: func(context.Context) error { die("frozen"); return nil }}, nil)
	t.Fatal("not killed", err)
}

// Whatever step the saving, importing or deleting process is killed at, there is the old or the new, whole.
func TestProcessKilled(t *testing.T) {
	for point, want := range map[string][]string{
		"frozen":    {"old"},
		"saved":     {"old"},
		"described": {"old"},
		"published": {"new", "old"},
		"hidden":    nil,

		"half imported": {"old"},
		"imported":      {"new", "old"},
	} {
		t.Run(point, func(t *testing.T) {
			s := newShelf(t)
			s.save(t, "old")
			err := helper(t, s.cfg, point).Run()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("not killed: %v", err)
			}
			all, err := s.List()
			if err != nil {
				t.Fatal(err)
			}
			var have []string
			for _, i := range all {
				have = append(have, i.ID)
				if err := s.use(t, i.ID); err != nil {
					t.Error(err)
				}
			}
			if !slices.Equal(have, want) {
				t.Errorf("there are %v, want %v", have, want)
			}
			if err := s.Sweep(); err != nil {
				t.Error(err)
			}
			entries, err := os.ReadDir(s.path())
			if err != nil || len(entries) != len(want) {
				t.Errorf("left: %v, %v", entries, err)
			}
		})
	}
}
