// Package cgroup puts a machine's process into a control group of its own, with limits on CPU time, memory and tasks, on
// hosts with cgroup v1, v2 or both. It knows nothing of what the process is.
//
// It fails closed: a host without the memory or pids controller runs no machine, since one guest could then take all
// of the host's. Without the cpu controller machines run, with one warning: they compete by the scheduler's rules.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
)

const (
	// Parent is the group that all machines' groups are in, from the root of each hierarchy.
	Parent = "/cube"
	// period is the kernel's default of cpu.cfs_period_us and cpu.max.
	period = 100 * time.Millisecond
	// minQuota is the least the kernel takes for a period (kernel/sched/core.c, min_cfs_quota_period).
	minQuota = time.Millisecond
	// maxCPUs is more than any host has, and little enough for the kernel's quotas.
	maxCPUs = 1 << 16
	// mountPoint is where systemd and every container runtime expect the hierarchies.
	mountPoint = "/sys/fs/cgroup"
)

// ErrNoController says that the host lacks a controller without which no machine may run.
var ErrNoController = errors.New("cgroup controller not available")

// Limits are a machine's.
type Limits struct {
	CPUs   float64 // CPU time per wall time; 0 = no limit
	Memory int64   // bytes, > 0
	PIDs   int64   // tasks (threads too), > 0
}

// Group is one machine's control group: one directory per hierarchy.
type Group struct {
	name string
	dirs []string
	v2   bool
}

// Create makes the group /cube/<name>. A group of that name is a leftover: it is emptied and removed first.
func Create(ctx context.Context, name string, l Limits, log *slog.Logger) (_ *Group, err error) {
	if name == "" || name != filepath.Base(name) || name == "." || name == ".." {
		return nil, fmt.Errorf("cgroup name %q", name)
	}
	if l.Memory <= 0 || l.PIDs <= 0 || !validCPUs(l.CPUs) {
		return nil, fmt.Errorf("cgroup %s: limits %+v are out of range", name, l)
	}
	if err := Remove(ctx, name); err != nil {
		return nil, err
	}
	g := &Group{name: name}
	if cgroups.Mode() == cgroups.Unified {
		err = g.createV2(l, log)
	} else {
		err = g.createV1(l, log)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create cgroup %s/%s: %w", Parent, name, err), g.Remove(ctx))
	}
	return g, nil
}

// hierarchiesV1 are the controllers that matter, each with the directory of its hierarchy. Co-mounted ones
// (cpu,cpuacct) share one.
func hierarchiesV1() ([]cgroup1.Subsystem, error) {
	all, err := cgroup1.Default()
	if err != nil {
		return nil, fmt.Errorf("no cgroup hierarchy is mounted: %w", err)
	}
	wanted := []cgroup1.Name{cgroup1.Memory, cgroup1.Pids, cgroup1.Cpu, cgroup1.Cpuacct}
	return slices.DeleteFunc(all, func(s cgroup1.Subsystem) bool { return !slices.Contains(wanted, s.Name()) }), nil
}

// dirsV1 are the group's directories, memory first.
func dirsV1(subsystems []cgroup1.Subsystem, path string) []string {
	var dirs []string
	for _, s := range subsystems {
		root := s.(interface{ Path(string) string }).Path("/")
		if real, err := filepath.EvalSymlinks(root); err == nil {
			root = real
		}
		dir := filepath.Join(root, path)
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

func (g *Group) createV1(l Limits, log *slog.Logger) error {
	subsystems, err := hierarchiesV1()
	if err != nil {
		return err
	}
	has := func(n cgroup1.Name) bool {
		return slices.ContainsFunc(subsystems, func(s cgroup1.Subsystem) bool { return s.Name() == n })
	}
	if err := require(has(cgroup1.Memory), has(cgroup1.Pids), has(cgroup1.Cpu), log); err != nil {
		return err
	}
	path := filepath.Join(Parent, g.name)
	g.dirs = dirsV1(subsystems, path)
	res := &specs.LinuxResources{
		Memory: &specs.LinuxMemory{Limit: &l.Memory},
		Pids:   &specs.LinuxPids{Limit: &l.PIDs},
		CPU:    &specs.LinuxCPU{},
	}
	if l.CPUs > 0 {
		quota, per := quota(l.CPUs), uint64(period.Microseconds())
		res.CPU.Quota, res.CPU.Period = &quota, &per
	}
	_, err = cgroup1.New(cgroup1.StaticPath(path), res,
		cgroup1.WithHierarchy(func() ([]cgroup1.Subsystem, error) { return subsystems, nil }),
		func(c *cgroup1.InitConfig) error {
			c.InitCheck = func(_ cgroup1.Subsystem, _ cgroup1.Path, err error) error { return err }
			return nil
		})
	return err
}

func (g *Group) createV2(l Limits, log *slog.Logger) error {
	root, err := cgroup2.Load("/")
	if err != nil {
		return err
	}
	have, err := root.RootControllers()
	if err != nil {
		return err
	}
	cpu := slices.Contains(have, "cpu")
	if err := require(slices.Contains(have, "memory"), slices.Contains(have, "pids"), cpu, log); err != nil {
		return err
	}
	path := filepath.Join(Parent, g.name)
	g.v2, g.dirs = true, []string{filepath.Join(mountPoint, path)}
	res := &cgroup2.Resources{
		Memory: &cgroup2.Memory{Max: &l.Memory},
		Pids:   &cgroup2.Pids{Max: l.PIDs},
	}
	if cpu && l.CPUs > 0 {
		quota, per := quota(l.CPUs), uint64(period.Microseconds())
		res.CPU = &cgroup2.CPU{Max: cgroup2.NewCPUMax(&quota, &per)}
	}
	_, err = cgroup2.NewManager(mountPoint, path, res)
	return err
}

// SetCPUs changes Limits.CPUs of a group. On a host without the cpu controller it does nothing, like Create.
func (g *Group) SetCPUs(cpus float64) error {
	if !validCPUs(cpus) {
		return fmt.Errorf("cgroup %s: a limit of %v CPUs is out of range", g.name, cpus)
	}
	file, value := "cpu.cfs_quota_us", "-1"
	if g.v2 {
		file, value = "cpu.max", "max"
	}
	if cpus > 0 {
		value = strconv.FormatInt(quota(cpus), 10)
	}
	for _, dir := range g.dirs {
		// Without O_CREATE: in a hierarchy without the controller, or one whose group is gone, there is no such file.
		f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = f.WriteString(value) // cpu.max keeps its period
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return fmt.Errorf("set the CPU limit of cgroup %s/%s: %w", Parent, g.name, err)
		}
	}
	return nil
}

// validCPUs is false for NaN, too.
func validCPUs(cpus float64) bool { return cpus >= 0 && cpus <= maxCPUs }

func quota(cpus float64) int64 {
	return max(int64(cpus*float64(period.Microseconds())), minQuota.Microseconds())
}

var warnCPU sync.Once

// require decides what a host must have.
func require(memory, pids, cpu bool, log *slog.Logger) error {
	for name, ok := range map[string]bool{"memory": memory, "pids": pids} {
		if !ok {
			return fmt.Errorf("%w: %s; enable it on the kernel's command line (cgroup_enable=%s) or delegate it to this group", ErrNoController, name, name)
		}
	}
	if !cpu {
		warnCPU.Do(func() { log.Warn("the host has no cpu cgroup controller: machines run without a CPU limit") })
	}
	return nil
}

// Entry is how a process gets into the group without the migration of a running process, for which the kernel waits for
// all processors.
type Entry struct {
	// Into, on cgroup v2, is the directory to be born in (CLONE_INTO_CGROUP); nil on v1.
	Into *os.File
	// Files, on cgroup v1, are files to which the thread that will execute the program writes "0", one per hierarchy.
	Files []*os.File
}

// Entry opens the way in. The caller closes it.
func (g *Group) Entry() (_ *Entry, err error) {
	e := &Entry{}
	for _, dir := range g.dirs {
		if g.v2 {
			e.Into, err = os.Open(dir)
		} else {
			var f *os.File
			if f, err = os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0); err == nil {
				e.Files = append(e.Files, f)
			}
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open cgroup: %w", err), e.Close())
		}
	}
	return e, nil
}

// Close closes the files.
func (e *Entry) Close() error {
	var errs []error
	if e.Into != nil {
		errs = append(errs, e.Into.Close())
	}
	for _, f := range e.Files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// Dirs are the group's directories, one per hierarchy.
func (g *Group) Dirs() []string { return slices.Clone(g.dirs) }

// Prune removes the parent of all groups where it is empty.
func Prune() {
	for _, dir := range dirsOf(Parent) {
		_ = os.Remove(dir)
	}
}

// dirsOf lists where a group's directories are, or would be, on this host.
func dirsOf(path string) []string {
	if cgroups.Mode() == cgroups.Unified {
		return []string{filepath.Join(mountPoint, path)}
	}
	subsystems, err := hierarchiesV1()
	if err != nil {
		return nil
	}
	return dirsV1(subsystems, path)
}

// List lists the names of all groups, of whichever stack.
func List() ([]string, error) {
	var names []string
	for _, dir := range dirsOf(Parent) {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list cgroups: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && !slices.Contains(names, e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

// Exists tells whether anything of the group is left.
func Exists(name string) bool {
	return slices.ContainsFunc(dirsOf(filepath.Join(Parent, name)), func(dir string) bool {
		_, err := os.Lstat(dir)
		return !errors.Is(err, fs.ErrNotExist)
	})
}
