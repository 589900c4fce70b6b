package stack

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cubesandbox/cube/cni/network"
)

// Leaks lists what of this stack is on the host although it should be down: processes, mounts, loop devices, sockets. The
// network stays until it is purged.
func (s *Stack) Leaks() []string {
	leaks := s.VMLeaks()
	leaks = append(leaks, s.leakedProcesses("")...)
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, s.Config.NetworkDir()) {
			continue
		}
		if strings.Contains(line, s.Dir+"/") || strings.Contains(line, s.Config.RunDir+"/") {
			leaks = append(leaks, "mount: "+line)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		if b, _ := os.ReadFile(l); strings.HasPrefix(string(b), s.Dir+"/") && !s.copied(l) {
			leaks = append(leaks, "loop device: "+l+" on "+strings.TrimSpace(string(b)))
		}
	}
	_ = filepath.WalkDir(s.Config.RunDir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type()&os.ModeSocket != 0 {
			leaks = append(leaks, "socket: "+path)
		}
		return nil
	})
	return leaks
}

// copied tells whether a loop device, by the name of its backing_file, is there for a copy of its mount alone, which a
// process that isn't the stack's has got with its mount namespace: the device goes with that one.
func (s *Stack) copied(backing string) bool {
	dev, err := os.ReadFile(filepath.Join(filepath.Dir(backing), "..", "dev"))
	if err != nil {
		return false
	}
	// All of it and where it was: what a jail has of it, a share's directory, is elsewhere, and a leak.
	mount := " " + strings.TrimSpace(string(dev)) + " / " + s.Dir + "/"
	here, _ := os.Readlink("/proc/self/ns/mnt")
	own := map[string]bool{}
	for _, p := range s.Processes("") {
		own[strconv.Itoa(p.PID)] = true
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		ns, err := os.Readlink(filepath.Join("/proc", e.Name(), "ns", "mnt"))
		if err != nil || ns == here || own[e.Name()] {
			continue
		}
		mounts, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "mountinfo"))
		if bytes.Contains(mounts, []byte(mount)) {
			return true
		}
	}
	return false
}

// networkLeaks lists what is left of the network that was purged: what its host has, mounts, files.
func (s *Stack) networkLeaks() ([]string, error) {
	leaks, err := s.Host.Left()
	if _, stat := os.Lstat(s.Config.NetworkDir()); stat == nil {
		leaks = append(leaks, "directory: "+s.Config.NetworkDir())
	}
	return leaks, err
}

// VMLeaks lists what is left of machines while the stack runs and no container should: shims, QEMUs, the directories of
// machines and pods, uid locks, places in the network with their addresses and ports, and taps. Taps that are ready for the
// next ones are none.
func (s *Stack) VMLeaks() []string {
	leaks := s.leakedProcesses("containerd-shim-cube-v2", "qemu-system")
	places := s.Config.NetworkDir()
	for _, dir := range []string{
		s.Config.VMDir(), s.Config.PodDir(), filepath.Join(s.Config.RunDir, "uids"),
		filepath.Join(places, "attachments"), filepath.Join(places, "addresses"), filepath.Join(places, "ports"),
	} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			leaks = append(leaks, "file: "+filepath.Join(dir, e.Name()))
		}
	}
	if s.Host == nil { // directories alone, without a network
		return leaks
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(10*time.Second))
	defer cancel()
	err := s.Host.Do(func() error {
		strays, err := network.New(s.Config).Strays(ctx)
		for _, tap := range strays {
			leaks = append(leaks, "tap: "+tap)
		}
		return err
	})
	if err != nil {
		leaks = append(leaks, "taps, perhaps: "+err.Error())
	}
	return leaks
}

// CgroupLeaks lists the cgroups of containers' machines and helpers.
func CgroupLeaks(ids ...string) []string {
	var leaks []string
	for _, id := range ids {
		for _, f := range append(CgroupFiles(id, "cgroup.procs"), CgroupFiles("share-"+id, "cgroup.procs")...) {
			leaks = append(leaks, "cgroup: "+filepath.Dir(f))
		}
	}
	return leaks
}

// CgroupFiles finds the files of a container's cgroups by name, in whichever hierarchy has them. The cgroup of a machine
// is called by the container's id and a word that tells stacks apart.
func CgroupFiles(id string, names ...string) []string {
	var found []string
	for _, name := range names {
		for _, parent := range []string{"/sys/fs/cgroup/cube", "/sys/fs/cgroup/*/cube"} {
			f, _ := filepath.Glob(filepath.Join(parent, id+"-????????????????", name))
			found = append(found, f...)
		}
	}
	return found
}

// Process is a process of the stack.
type Process struct {
	PID     int
	Command string
}

func (p Process) String() string { return fmt.Sprintf("process %d: %.160s", p.PID, p.Command) }

// Processes lists the stack's processes whose command line holds word.
func (s *Stack) Processes(word string) []Process {
	var found []Process
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		cmdline, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		environ, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		command := strings.ReplaceAll(strings.TrimRight(string(cmdline), "\x00"), "\x00", " ")
		if (strings.Contains(command, s.Name()) || strings.Contains(string(environ), s.Name())) && strings.Contains(command, word) {
			found = append(found, Process{pid, command})
		}
	}
	return found
}

func (s *Stack) leakedProcesses(words ...string) []string {
	var leaks []string
	for _, w := range words {
		for _, p := range s.Processes(w) {
			leaks = append(leaks, p.String())
		}
	}
	return leaks
}
