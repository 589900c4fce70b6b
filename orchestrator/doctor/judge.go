package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/snapshotter/store"
)

const (
	// littleDisk and tooLittleDisk are free bytes in the store's file system.
	littleDisk    = 2 * units.GiB
	tooLittleDisk = 256 * units.MiB
	// overhead is what a machine takes beside its guest's memory, in bytes, roughly.
	overhead = 64 * units.MiB
)

// Judge says what the facts mean for this configuration.
func Judge(cfg *config.Config, f Facts) []Finding {
	var out []Finding
	add := func(l Level, name, detail, remedy string) {
		out = append(out, Finding{Level: l, Name: name, Detail: detail, Remedy: remedy})
	}
	for _, judge := range []func(*config.Config, Facts, func(Level, string, string, string)){
		judgeHost, judgeAccelerator, judgeArtefacts, judgeStore, judgeKernel, judgeNetwork, judgeSockets, judgeTools,
	} {
		judge(cfg, f, add)
	}
	if !f.Root {
		return out // what is only root's can't be seen
	}
	return append(out, judgeLeftovers(f.Leftovers)...)
}

func judgeHost(cfg *config.Config, f Facts, add func(Level, string, string, string)) {
	h := f.Host
	detail := fmt.Sprintf("%s, kernel %s, %s, %d CPUs", first(h.OS, "unknown distribution"), h.Kernel, h.Arch, h.CPUs)
	switch {
	case h.Virtual != "":
		detail += ", virtual (" + h.Virtual + ")"
	default:
		detail += ", real hardware"
	}
	if h.Docker {
		detail += ", inside a container"
	}
	if h.Arch == "amd64" {
		add(OK, "host", detail, "")
	} else {
		add(Fail, "host", detail, "the guest image and QEMU are for amd64: use such a host")
	}
	if !f.Root {
		add(Fail, "user", "not root: some of this may be wrong for that", "use sudo")
	}
	need := uint64(cfg.VM.Memory) + overhead
	memory := fmt.Sprintf("%s available, the default machine takes %s", size(f.Memory), size(need))
	switch {
	case f.Memory < need:
		add(Fail, "memory", memory, "free some, or lower vm.memory")
	case f.Memory < 4*need:
		add(Warn, "memory", memory, "few machines fit")
	default:
		add(OK, "memory", memory, "")
	}
}

func judgeAccelerator(cfg *config.Config, f Facts, add func(Level, string, string, string)) {
	a := f.Accelerator
	switch {
	case a.Err != nil:
		add(Fail, "accelerator", a.Err.Error(), "set vm.accelerator = \"tcg\" to do without KVM")
	case a.Name == "kvm":
		add(OK, "accelerator", "kvm: "+a.Reason, "")
	case cfg.VM.Accelerator == "tcg":
		add(OK, "accelerator", "tcg, as configured: "+a.Reason, "")
	default:
		add(Warn, "accelerator", "tcg: "+a.Reason, "machines work but are many times slower; use a host with a KVM that boots the guest")
	}
}

func judgeArtefacts(_ *config.Config, f Facts, add func(Level, string, string, string)) {
	for _, a := range []struct {
		name string
		Artefact
	}{{"qemu", f.QEMU}, {"guest image", f.Guest}} {
		if a.Err != nil {
			add(Fail, a.name, a.Err.Error(), "`make setup` makes it, or set artefacts to where it is")
			continue
		}
		add(OK, a.name, fmt.Sprintf("%s, intact in %s", a.Version, a.Dir), "")
	}
}

func judgeStore(_ *config.Config, f Facts, add func(Level, string, string, string)) {
	if f.StoreAt != nil {
		add(Fail, "store", f.StoreAt.Error(), "see docs/configuration.md for state_dir and store.size")
		return
	}
	st := f.Store
	state := "ready"
	if !st.Ready {
		state = "`cube up` makes it"
	}
	detail := fmt.Sprintf("%s (%s), %s", st.Dir, st.Kind, state)
	if st.Reflink {
		add(OK, "reflink", detail+": disks are clones that share blocks", "")
	} else {
		add(Warn, "reflink", detail+": the file system can't clone files, so that every disk is a copy", "set store.size, or put state_dir on XFS or btrfs")
	}
	free := fmt.Sprintf("%s of %s free in %s", size(uint64(st.Free)), size(uint64(st.Size)), st.Dir)
	switch {
	case st.Free < tooLittleDisk:
		add(Fail, "disk", free, "make room, or move state_dir")
	case st.Free < littleDisk:
		add(Warn, "disk", free, "few images fit; raise store.size or make room")
	default:
		add(OK, "disk", free, "")
	}
}

func judgeKernel(_ *config.Config, f Facts, add func(Level, string, string, string)) {
	needed := []string{"ext4"}
	if f.Store.Kind == store.Image {
		needed = append(needed, "xfs")
	}
	missing := slices.DeleteFunc(slices.Clone(needed), func(fs string) bool { return slices.Contains(f.FileSystems, fs) })
	switch {
	case f.LoopControl != nil:
		add(Fail, "loop devices", f.LoopControl.Error(), "modprobe loop")
	case len(missing) > 0:
		add(Warn, "file systems", "not loaded: "+strings.Join(missing, ", "), "modprobe "+strings.Join(missing, " ")+", unless the kernel loads it when it is needed")
	default:
		add(OK, "file systems", strings.Join(needed, ", ")+", through loop devices", "")
	}
	if f.TUN != nil {
		add(Fail, "tun", f.TUN.Error(), "modprobe tun; every machine has a network device")
	} else {
		add(OK, "tun", "/dev/net/tun works", "")
	}
	c := f.CGroups
	detail := fmt.Sprintf("%s, controllers %s", c.Mode, strings.Join(c.Controllers, " "))
	lacks := slices.DeleteFunc([]string{"memory", "pids"}, func(n string) bool { return slices.Contains(c.Controllers, n) })
	switch {
	case c.Err != nil:
		add(Fail, "cgroups", c.Err.Error(), "mount -t cgroup2 none /sys/fs/cgroup")
	case len(lacks) > 0:
		add(Fail, "cgroups", detail, "machines can't be limited without "+strings.Join(lacks, " and ")+": enable them (kernel parameter cgroup_enable)")
	case !slices.Contains(c.Controllers, "cpu"):
		add(Warn, "cgroups", detail, "without cpu, machines' CPU time isn't limited: enable it")
	default:
		add(OK, "cgroups", detail, "")
	}
}

func judgeSockets(cfg *config.Config, f Facts, add func(Level, string, string, string)) {
	s := f.Sockets
	up := fmt.Sprintf("`cube up` runs as process %d in %s", s.Up, cfg.RunDir)
	switch {
	case s.Up == 0 && s.Foreign != "":
		add(Fail, "sockets", s.Foreign+" is another process's", "`cube down` ends what a killed `cube up` has left; otherwise set run_dir")
	case s.Up == 0 && s.Err != nil:
		add(Fail, "sockets", s.Err.Error(), "set run_dir to a directory of its own")
	case s.Up == 0:
		add(OK, "sockets", "free in "+cfg.RunDir, "")
	case s.Err != nil:
		add(Fail, "stack", up+", but "+s.Err.Error(), "`cube down`, then `cube up -d`")
	case !s.Report.Ready:
		add(Fail, "stack", up+", not ready: "+strings.Join(s.Report.Missing(), "; "), "see the logs in "+cfg.LogDir())
	default:
		add(OK, "stack", up+" and is ready", "")
	}
	switch {
	case s.Address == "":
	case s.ContainerdErr != nil:
		add(Fail, "containerd", s.ContainerdErr.Error(), "start it, or leave containerd.address out for a private one")
	default:
		add(OK, "containerd", fmt.Sprintf("%s at %s, existing", s.Containerd, s.Address), "")
	}
}

func judgeTools(_ *config.Config, f Facts, add func(Level, string, string, string)) {
	for _, t := range f.Tools {
		required := t.Required || t.Name == "mkfs.xfs" && f.Store.Kind == store.Image && !f.Store.Ready
		switch {
		case t.Err == nil:
			add(OK, t.Name, strings.TrimPrefix(t.Version+", "+t.Path, ", "), "")
		case required:
			add(Fail, t.Name, t.Err.Error(), t.Remedy)
		default:
			add(Warn, t.Name, t.Err.Error(), t.Remedy)
		}
	}
}

func size(n uint64) string { return units.BytesSize(float64(n)) }

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}
