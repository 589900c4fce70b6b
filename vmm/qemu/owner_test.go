package qemu_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/qemu"
	"github.com/cubesandbox/cube/vmm/record"
)

// ownerEnv makes the test binary a process that launches a machine and is then killed. Its value is the machine's
// directory; descriptors 3 to 5 are memory, state and modules.
const ownerEnv = "CUBE_TEST_OWNER"

func owner(dir string) int {
	var cfg config.Config
	if err := json.Unmarshal([]byte(os.Getenv("CUBE_TEST_CONFIG")), &cfg); err != nil {
		fmt.Println(err)
		return 1
	}
	s := &qemu.Spec{
		ID: "orphan", Dir: dir, QEMU: cfg.QEMUDir(), Shape: shape, Accel: accel.TCG,
		Memory: os.NewFile(3, "memory"), State: os.NewFile(4, "state"), Modules: os.NewFile(5, "modules"),
	}
	m, err := qemu.NewDriver(&cfg, slog.Default()).Start(context.Background(), s)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(m.PID())
	<-m.Done()
	return 0
}

// After a kill -9 of the owner the machine ends by itself, and Cleanup frees what it held.
func TestOwnerKilled(t *testing.T) {
	cfg := testguest.Config(t)
	s := restoreSpec(t, cfg, "orphan")
	b, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+s.Dir, "CUBE_TEST_CONFIG="+string(b))
	cmd.ExtraFiles = []*os.File{s.Memory, s.State, s.Modules}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	held, err := record.Read(s.Dir)
	if err != nil || held.Owner.PID != cmd.Process.Pid || strconv.Itoa(held.QEMU.PID)+"\n" != line {
		t.Errorf("record %+v, %v; the owner is %d and says %q", held, err, cmd.Process.Pid, line)
	}
	if left, err := record.Leftovers(cfg); err != nil || len(left) != 0 {
		t.Errorf("leftovers while the owner lives: %v, %v", left, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if left, err := record.Leftovers(cfg); err != nil || len(left) != 1 || left[0].State.ID != "orphan" || left[0].Dir != s.Dir {
		t.Errorf("leftovers %v, %v", left, err)
	}
	for deadline := time.Now().Add(cfg.Timeout(2 * time.Second)); held.QEMU.Alive(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("QEMU has outlived its owner")
			break
		}
	}
	began := time.Now()
	for range 2 {
		if err := record.Cleanup(cfg, s.Dir); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("cleaned up in %s", time.Since(began))
	nothingLeft(t, cfg, s.Dir, held)
}

// Cleanup ends a machine that still runs, and leaves alone what is not the machine's.
func TestCleanup(t *testing.T) {
	cfg := testguest.Config(t)
	s := restoreSpec(t, cfg, "abandoned")
	m, err := qemu.NewDriver(cfg, slog.Default()).Start(within(t, cfg.Timeout(20*time.Second)), s)
	if err != nil {
		t.Fatal(err)
	}
	held, err := record.Read(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	// Another machine's record with a recycled pid must not hurt this one.
	stranger := filepath.Join(cfg.VMDir(), "stranger")
	if err := os.Mkdir(stranger, 0o700); err != nil {
		t.Fatal(err)
	}
	r, err := record.New(t.Context(), stranger, "stranger")
	if err == nil {
		err = r.Update(func(st *record.State) {
			st.QEMU, st.UID = held.QEMU, held.UID
			st.QEMU.Start++
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := record.Cleanup(cfg, stranger); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(cfg.RunDir, "uids", strconv.Itoa(int(held.UID)))); err != nil || !held.QEMU.Alive() {
		t.Fatalf("the stranger's clean-up hit this machine: uid %v, alive %v", err, held.QEMU.Alive())
	}
	if err := record.Cleanup(cfg, s.Dir); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, cfg, s.Dir, held)
	ended(t, m, time.Second)
	if err := m.Stop(gone()); err != nil {
		t.Errorf("stop after the clean-up: %v", err)
	}
}
