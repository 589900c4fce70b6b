package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
)

// status reads a field of /proc/PID/status.
func status(t *testing.T, pid int, field string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Fatalf("no %s in /proc/%d/status", field, pid)
	return ""
}

func TestJail(t *testing.T) {
	id, pid := start(t, "jail", nil, "sleep", "1000")
	_, other := start(t, "jail2", nil, "sleep", "1000")

	uid := strings.Fields(status(t, pid, "Uid"))
	n, _ := strconv.Atoi(uid[0])
	base := int(s.Config.VM.UIDBase)
	if n < base || n >= base+int(s.Config.VM.UIDCount) || uid[0] != uid[1] || uid[0] != uid[2] || uid[0] != uid[3] {
		t.Errorf("uids %v, want one of the range from %d", uid, base)
	}
	if uid[0] == strings.Fields(status(t, other, "Uid"))[0] {
		t.Error("two machines share a uid")
	}
	if g := status(t, pid, "Groups"); g != "" {
		t.Errorf("supplementary groups %q", g)
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if v := status(t, pid, set); strings.Trim(v, "0") != "" {
			t.Errorf("%s is %s, want none", set, v)
		}
	}
	if v := status(t, pid, "NoNewPrivs"); v != "1" {
		t.Errorf("NoNewPrivs is %s", v)
	}
	if v := status(t, pid, "Seccomp"); v != "2" {
		t.Errorf("Seccomp is %s, want 2 (filter)", v)
	}
	for _, ns := range []string{"mnt", "net", "ipc"} {
		own, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		host, _ := os.Readlink("/proc/self/ns/" + ns)
		sibling, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", other, ns))
		if own == "" || own == host || own == sibling {
			t.Errorf("%s namespace %q, the host's %q, another machine's %q", ns, own, host, sibling)
		}
	}
	limits, _ := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	for _, line := range strings.Split(string(limits), "\n") {
		if strings.HasPrefix(line, "Max core file size") && strings.Fields(line)[4] != "0" {
			t.Errorf("core dumps allowed: %s", line)
		}
	}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		target, _ := os.Readlink(fd)
		// Files of the host are open by what they are (disk, memory, state), never directories or devices but tun and kvm.
		if st, err := os.Stat(fd); err == nil && st.IsDir() {
			t.Errorf("open directory %s", target)
		}
	}
	root, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range root {
		if strings.Contains(" home etc var root boot srv opt ", " "+e.Name()+" ") {
			t.Errorf("the jail's root has %s", e.Name())
		}
	}
	mounts, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	for _, line := range strings.Split(strings.TrimSpace(string(mounts)), "\n") {
		if f := strings.Fields(line); f[4] == "/" && !strings.HasPrefix(f[5], "ro") {
			t.Errorf("the jail's root is writable: %s", line)
		}
	}
	if len(stack.CgroupFiles(id, "memory.limit_in_bytes", "memory.max")) == 0 || len(stack.CgroupFiles(id, "pids.max")) == 0 {
		t.Error("no memory or pids cgroup")
	}
	for _, f := range stack.CgroupFiles(id, "memory.limit_in_bytes", "memory.max") {
		limit := readInt(t, f)
		if guest := int64(s.Config.VM.Memory); limit < guest || limit > 2*guest+(256<<20) {
			t.Errorf("%s is %d for a guest of %d bytes", f, limit, guest)
		}
		procs, _ := os.ReadFile(filepath.Join(filepath.Dir(f), "cgroup.procs"))
		if !strings.Contains("\n"+string(procs), fmt.Sprintf("\n%d\n", pid)) {
			t.Errorf("QEMU isn't in %s", filepath.Dir(f))
		}
	}
	for _, f := range stack.CgroupFiles(id, "pids.max") {
		if n := readInt(t, f); n < 2 || n > 1024 {
			t.Errorf("%s is %d", f, n)
		}
	}
}

func readInt(t *testing.T, file string) int64 {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return n
}

// TestSpinningGuest lets a guest with half a CPU spin and reads the CPU time that its process got.
func TestSpinningGuest(t *testing.T) {
	_, pid := start(t, "spin", []string{"--cpu-quota", "50000", "--cpu-period", "100000"}, "sh", "-c", "while :; do :; done")
	before, started := cpuTime(t, pid), time.Now()
	time.Sleep(4 * time.Second) // the span of the measurement, not a wait
	used, span := cpuTime(t, pid)-before, time.Since(started)
	if share := used.Seconds() / span.Seconds(); share > 0.65 {
		t.Errorf("a guest limited to 0.5 CPUs used %.2f", share)
	} else {
		t.Logf("used %.2f CPUs of 0.5", share)
	}
}

// cpuTime is a process's user and system time.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	const hz = 100 // USER_HZ, fixed in the kernel's ABI
	return time.Duration(user+system) * time.Second / hz
}

// TestMemoryHog lets containers eat memory. One dies of its own limit, the other of its machine's: both in the guest,
// which tells of it. The host never has to kill the machine for the limit of its cgroup.
func TestMemoryHog(t *testing.T) {
	hog := "import sys\nb=[]\ntry:\n  while True: b.append(bytearray(1<<20))\nexcept MemoryError:\n  sys.exit(99)"
	r := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", "--memory-limit", strconv.Itoa(128<<20),
		stack.Image, s.ID(t, "hog"), "python3", "-c", hog)
	if r.Code != 137 {
		t.Fatalf("exit code %d, want 137 (killed for its memory): %s", r.Code, r.Stderr)
	}

	id := s.ID(t, "hog2")
	ch, ooms := exits(t, id), ooms(t, id)
	start(t, "hog2", nil, "python3", "-c", hog)
	usage := stack.CgroupFiles(id, "memory.max_usage_in_bytes", "memory.peak")
	kills := stack.CgroupFiles(id, "memory.oom_control", "memory.events")
	if len(usage) != 1 || len(kills) != 1 {
		t.Fatalf("the machine's memory cgroup: %v, %v", usage, kills)
	}
	var peak int64
	var status uint32
	s.Eventually(t, 60*time.Second, "the container killed", func() bool {
		if b, err := os.ReadFile(usage[0]); err == nil { // it goes with the machine
			n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
			peak = max(peak, n)
		}
		if b, err := os.ReadFile(kills[0]); err == nil && !strings.Contains(string(b), "oom_kill 0\n") {
			t.Fatalf("the host killed the machine for its memory: %s", b)
		}
		select {
		case status = <-ch:
			return true
		default:
			return false
		}
	})
	if guest := int64(s.Config.VM.Memory); status != 137 || peak < guest/2 {
		t.Errorf("status %d with a peak of %d MiB, want 137 and a guest of %d MiB that was filled", status, peak>>20, guest>>20)
	}
	select {
	case <-ooms: // published before the exit, but on a stream of its own
	case <-time.After(s.Config.Timeout(heard)):
		t.Error("the guest didn't tell that it ran out of memory")
	}
	t.Logf("peak %d MiB", peak>>20)
}
