package jail

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/cubesandbox/cube/internal/process"
)

const testBase = 3_000_000

func newUIDs(t *testing.T, count uint32) *UIDs {
	t.Helper()
	return &UIDs{dir: filepath.Join(t.TempDir(), "uids"), base: testBase, count: count}
}

func fine(uint32) error { return nil }

func TestEachMachineHasItsUID(t *testing.T) {
	const n = 50
	u := newUIDs(t, n)
	var mu sync.Mutex
	taken := make(map[uint32]bool)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			claimed := uint32(0)
			uid, err := u.Take("/vm/x", func(uid uint32) error { claimed = uid; return nil })
			mu.Lock()
			defer mu.Unlock()
			if err != nil || uid < testBase || uid >= testBase+n || taken[uid] || claimed != uid {
				t.Errorf("uid %d (claimed %d), taken %v, %v", uid, claimed, taken[uid], err)
			}
			taken[uid] = true
		})
	}
	wg.Wait()
	if _, err := u.Take("/vm/y", fine); !errors.Is(err, ErrNoUID) {
		t.Fatalf("one too many: %v", err)
	}
	// Only the machine itself gives its uid back.
	for _, dir := range []string{"/vm/other", "/vm/x", "/vm/x"} {
		if err := u.Release(testBase+7, dir); err != nil {
			t.Fatal(err)
		}
		_, err := os.Lstat(u.path(testBase + 7))
		if free := err != nil; free != (dir == "/vm/x") {
			t.Errorf("released by %s: free %v", dir, free)
		}
	}
	if uid, err := u.Take("/vm/y", fine); err != nil || uid != testBase+7 {
		t.Errorf("took %d, %v", uid, err)
	}
}

func TestClaimIsBeforeTaking(t *testing.T) {
	u := newUIDs(t, 1)
	boom := errors.New("boom")
	if _, err := u.Take("/vm/x", func(uid uint32) error {
		if _, err := os.Lstat(u.path(uid)); err == nil {
			t.Error("taken before it was recorded")
		}
		return boom
	}); !errors.Is(err, boom) {
		t.Fatalf("got %v", err)
	}
	if entries, _ := os.ReadDir(u.dir); len(entries) != 0 {
		t.Errorf("left: %v", entries)
	}
}

// A dead owner's uid is free only when nothing runs under it.
func TestStaleUIDs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	u := newUIDs(t, 2)
	for range 2 {
		if _, err := u.Take("/vm/x", fine); err != nil {
			t.Fatal(err)
		}
	}
	self, err := process.Self()
	if err != nil {
		t.Fatal(err)
	}
	orphan := func(uid uint32) {
		b, _ := json.Marshal(lock{Owner: process.ID{PID: self.PID, Start: self.Start + 1}, Dir: "/vm/x"})
		if err := os.WriteFile(u.path(uid), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	orphan(testBase)
	cmd := exec.Command("sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testBase, Gid: testBase}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Take("/vm/y", fine); !errors.Is(err, ErrNoUID) {
		t.Errorf("a uid under which a process runs: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if uid, err := u.Take("/vm/y", fine); err != nil || uid != testBase {
		t.Errorf("took %d, %v", uid, err)
	}
	if _, err := u.Take("/vm/z", fine); !errors.Is(err, ErrNoUID) {
		t.Errorf("a living owner's uid: %v", err)
	}
}
