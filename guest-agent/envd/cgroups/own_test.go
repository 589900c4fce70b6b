package cgroups

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// TestOwn: what a command has started is killed with its group, also what has left its session, and of the group nothing is left.
func TestOwn(t *testing.T) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil || len(mounts) == 0 || os.Geteuid() != 0 {
		t.Skipf("SKIPPED: it takes root and a cgroup2: %v", err)
	}
	at, err := os.MkdirTemp(mounts[0].Mountpoint, "cube-test-own-")
	must(t, err)
	defer func() { must(t, os.Remove(at)) }()
	parent, err := os.Open(at)
	must(t, err)
	defer parent.Close()
	o, err := NewOwn(parent)
	must(t, err)
	c := exec.Command("/bin/sh", "-c", "setsid sleep 1000 & echo $!; wait")
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(o.Dir.Fd())}
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := o.empty(time.Now().Add(10 * time.Millisecond)); err == nil || !strings.Contains(err.Error(), "processes are left") {
		t.Errorf("while there are processes: %v", err)
	}
	must(t, o.Kill())
	_ = c.Wait()
	if got := c.ProcessState.Sys().(syscall.WaitStatus).Signal(); got != unix.SIGKILL {
		t.Errorf("it has ended by %v", got)
	}
	must(t, o.Remove(time.Minute))
	if left, err := os.ReadDir(at); err != nil {
		t.Error(err)
	} else {
		for _, e := range left {
			if e.IsDir() {
				t.Errorf("%s is left", e.Name())
			}
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
