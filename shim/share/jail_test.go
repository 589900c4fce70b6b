package share_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/spec"
)

// status reads fields of /proc/<pid>/status.
func status(t testing.TB, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		fields[k] = strings.Join(strings.Fields(v), " ")
	}
	return fields
}

// What the kernel says about a helper.
func TestJail(t *testing.T) {
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		readOnly bool
		caps     int
	}{
		"read-write": {false, 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID},
		"read-only":  {true, 1 << unix.CAP_DAC_READ_SEARCH},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, spec.Share{Source: dir, ReadOnly: tc.readOnly})
			st := status(t, s.PID())
			caps := fmt.Sprintf("%016x", tc.caps)
			for k, want := range map[string]string{
				"Name": "cube-share", "NoNewPrivs": "1", "Seccomp": "2", "Groups": "",
				"CapEff": caps, "CapPrm": caps, "CapInh": caps, "CapAmb": caps, "CapBnd": fmt.Sprintf("%016x", 0),
				"NSpid": strconv.Itoa(s.PID()) + " 1",
			} {
				if st[k] != want {
					t.Errorf("%s %q, want %q", k, st[k], want)
				}
			}
			uid, err := strconv.Atoi(strings.Fields(st["Uid"])[0])
			if err != nil || uid < 1<<20 || st["Uid"] != strings.TrimSpace(strings.Repeat(strconv.Itoa(uid)+" ", 4)) || st["Gid"] != st["Uid"] {
				t.Errorf("uid %s, gid %s", st["Uid"], st["Gid"])
			}
			for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts"} {
				ours, err := os.Readlink("/proc/self/ns/" + ns)
				theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", s.PID(), ns))
				if err != nil || err2 != nil || ours == theirs {
					t.Errorf("%s namespace %s, ours is %s: %v, %v", ns, theirs, ours, err, err2)
				}
			}
			limited(t, s.PID())
			mounts(t, s.PID(), tc.readOnly)
			descriptors(t, s.PID())
			if links, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", s.PID())); err != nil || strings.Count(string(links), ":") != 1 {
				t.Errorf("network devices %s, %v", links, err)
			}
		})
	}
}

// limited checks that the helper is in a cgroup of its own, of both controllers that matter, and dumps no core.
func limited(t *testing.T, pid int) {
	t.Helper()
	read := func(name string) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(strings.Fields(string(b)), " ")
	}
	groups := read("cgroup")
	v1 := strings.Contains(groups, ":memory:/cube/share-") && strings.Contains(groups, ":pids:/cube/share-")
	if v2 := strings.Contains(groups, "0::/cube/share-"); !v1 && !v2 {
		t.Errorf("cgroups %s", groups)
	}
	if limits := read("limits"); !strings.Contains(limits, "Max core file size 0 0 ") {
		t.Errorf("limits %s", limits)
	}
}

func mounts(t *testing.T, pid int, readOnly bool) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{
		"/": {"ro", "nosuid", "nodev"}, "/proc": {"nosuid", "nodev", "noexec"}, "/cube-share": {"ro", "nosuid", "nodev"}, "/0": {"nosuid", "nodev", "nosymfollow"},
	}
	if readOnly {
		want["/0"] = append(want["/0"], "ro")
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		options, ok := want[f[4]]
		if !ok {
			t.Errorf("mounted: %s", line)
		}
		for _, o := range options {
			if !slices.Contains(strings.Split(f[5], ","), o) {
				t.Errorf("not %s: %s", o, line)
			}
		}
		if strings.Contains(line, "shared:") || strings.Contains(line, "master:") {
			t.Errorf("not private: %s", line)
		}
		delete(want, f[4])
	}
	if len(want) > 0 {
		t.Errorf("not mounted: %v in %s", want, b)
	}
	if entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", pid)); err != nil || len(entries) != 3 {
		t.Errorf("root has %v, %v", entries, err)
	}
}

// descriptors: the socket, output, the share, and what the Go runtime has; nothing of the launching process.
func descriptors(t *testing.T, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // a directory that was being read
		}
		if target == "/dev/null" || target == "/0" || strings.HasPrefix(target, "pipe:") || strings.HasPrefix(target, "socket:") ||
			strings.HasPrefix(target, "anon_inode:") {
			continue
		}
		t.Errorf("descriptor %s is %s", e.Name(), target)
	}
}
