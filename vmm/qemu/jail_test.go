package qemu_test

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/vmm/internal/testguest"
)

// status reads a process's /proc/<pid>/status.
func status(t testing.TB, pid int) map[string]string {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m := make(map[string]string)
	for s := bufio.NewScanner(f); s.Scan(); {
		k, v, _ := strings.Cut(s.Text(), ":")
		m[k] = strings.Join(strings.Fields(v), " ")
	}
	return m
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// The jail is read back from the kernel, for every thread of QEMU.
func TestJail(t *testing.T) {
	cfg := testguest.Config(t)
	m, _ := restored(t, cfg, "jailed")
	pid := m.PID()
	proc := func(name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }

	tasks, err := os.ReadDir(proc("task"))
	if err != nil {
		t.Fatal(err)
	}
	var uid string
	for _, task := range tasks {
		st := status(t, mustAtoi(t, task.Name()))
		ids := strings.Fields(st["Uid"])
		uid = ids[0]
		n := uint32(mustAtoi(t, uid))
		if n < cfg.VM.UIDBase || n >= cfg.VM.UIDBase+cfg.VM.UIDCount || st["Uid"] != strings.Join([]string{uid, uid, uid, uid}, " ") || st["Gid"] != st["Uid"] {
			t.Errorf("thread %s: uid %s, gid %s", task.Name(), st["Uid"], st["Gid"])
		}
		if st["Groups"] != "" {
			t.Errorf("thread %s: groups %s", task.Name(), st["Groups"])
		}
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if strings.Trim(st[set], "0") != "" {
				t.Errorf("thread %s: %s %s", task.Name(), set, st[set])
			}
		}
		if st["NoNewPrivs"] != "1" || st["Seccomp"] != "2" || st["Umask"] != "0077" {
			t.Errorf("thread %s: no_new_privs %s, seccomp %s, umask %s", task.Name(), st["NoNewPrivs"], st["Seccomp"], st["Umask"])
		}
	}
	for _, ns := range []string{"mnt", "net", "ipc", "uts"} {
		theirs, err := os.Readlink(proc("ns/" + ns))
		ours, err2 := os.Readlink("/proc/self/ns/" + ns)
		if err != nil || err2 != nil || theirs == ours {
			t.Errorf("namespace %s: %s, ours %s, %v %v", ns, theirs, ours, err, err2)
		}
	}
	checkRoot(t, pid)
	checkFiles(t, pid)

	limits := read(t, proc("limits"))
	for _, want := range []string{`Max core file size +0 +0 `, `Max open files +1024 +1024 `} {
		if !regexp.MustCompile(want).MatchString(limits) {
			t.Errorf("limits: no %q in\n%s", want, limits)
		}
	}
	if env := read(t, proc("environ")); env != "" {
		t.Errorf("environment %q", env)
	}
	if cmdline := strings.Split(read(t, proc("cmdline")), "\x00"); cmdline[1] != "-name" || cmdline[2] != "jailed" {
		t.Errorf("command line %q", cmdline)
	}
	checkCgroup(t, pid, "jailed-")
}

// checkRoot looks at the file system as QEMU sees it: its artefacts, read-only, and a proc that shows only itself.
func checkRoot(t *testing.T, pid int) {
	t.Helper()
	mounts := strings.Split(read(t, fmt.Sprintf("/proc/%d/mountinfo", pid)), "\n")
	if len(mounts) != 4 {
		t.Errorf("mounts:\n%s", strings.Join(mounts, "\n"))
	}
	for _, l := range mounts {
		f := strings.Fields(l)
		flags := strings.Split(f[5], ",")
		var want []string
		switch f[4] {
		case "/":
			want = []string{"ro", "nosuid", "nodev"}
		case "/dev":
			want = []string{"ro", "nosuid", "noexec"}
		case "/proc":
			want = []string{"ro", "nosuid", "nodev", "noexec"}
		case "/proc/kernel":
			want = []string{"nosuid", "nodev", "noexec"}
			if !strings.Contains(l, "hidepid") {
				t.Errorf("proc shows all processes: %s", l)
			}
		default:
			t.Errorf("unexpected mount %s", l)
		}
		for _, w := range want {
			if !slices.Contains(flags, w) {
				t.Errorf("a mount lacks %s: %s", w, l)
			}
		}
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/", pid))
	if err != nil {
		t.Fatal(err)
	}
	if devices, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/dev", pid)); err != nil || len(devices) != 1 || devices[0].Name() != "null" {
		t.Errorf("the jail's /dev has %v, %v", devices, err)
	}
	known := []string{"bin", "dev", "lib", "lib64", "manifest.json", "proc", "run", "sbin", "sys", "tmp", "usr"}
	for _, e := range entries {
		if !slices.Contains(known, e.Name()) {
			t.Errorf("the jail's root has %s", e.Name())
		}
	}
}

// checkFiles makes sure that QEMU holds nothing but what it was handed.
func checkFiles(t *testing.T, pid int) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	allowed := regexp.MustCompile(`^(/dev/null|(/dev)?/net/tun|socket:\[\d+\]|pipe:\[\d+\]|anon_inode:\[(eventfd|signalfd)\]|/memfd:guest memory \(deleted\)|/.*/modules\.img|/.*/cube-test-state-\d+)$`)
	var names []string
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join("/proc", fmt.Sprint(pid), "fd", fd.Name()))
		if err != nil {
			continue // opened for a moment
		}
		names = append(names, fd.Name()+" "+target)
		if !allowed.MatchString(target) {
			t.Errorf("descriptor %s is %s", fd.Name(), target)
		}
	}
	t.Logf("descriptors: %s", strings.Join(names, ", "))
}

// checkCgroup finds the groups of a process, whichever hierarchies the host has, and their limits.
func checkCgroup(t *testing.T, pid int, prefix string) {
	t.Helper()
	found := map[string]string{}
	for _, l := range strings.Split(read(t, fmt.Sprintf("/proc/%d/cgroup", pid)), "\n") {
		f := strings.SplitN(l, ":", 3)
		if !strings.HasPrefix(f[2], "/cube/"+prefix) {
			continue
		}
		hierarchy := f[1]
		for _, name := range []string{"memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"} {
			if b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", hierarchy, f[2], name)); err == nil {
				found[name] = strings.TrimSpace(string(b))
			}
		}
	}
	if v := found["memory.limit_in_bytes"] + found["memory.max"]; v == "" || v == "max" || len(v) > 12 {
		t.Errorf("memory limit %q", v)
	}
	if v := found["cpu.cfs_quota_us"] + found["cpu.max"]; !strings.HasPrefix(v, "100000") {
		t.Errorf("cpu limit %q", v)
	}
	if v := found["pids.max"]; v == "" || v == "max" {
		t.Errorf("pids limit %q", v)
	}
	t.Logf("cgroup limits: %v", found)
}
