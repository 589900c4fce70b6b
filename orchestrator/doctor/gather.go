package doctor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/leftover"
	"github.com/cubesandbox/cube/orchestrator/stack"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/snapshotter/store"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/base"
)

// askTimeout bounds each question to another process.
const askTimeout = 5 * time.Second

// Gather looks at the host. It changes nothing, except that an accelerator that wasn't proved since the host came up is,
// which boots a guest.
func Gather(ctx context.Context, cfg *config.Config) Facts {
	f := Facts{
		Root:        os.Geteuid() == 0,
		Host:        host(),
		Memory:      availableMemory(),
		QEMU:        look(cfg.QEMUDir(), "qemu-system-x86"),
		Guest:       look(cfg.GuestDir(), "crun"),
		TUN:         tun(),
		BPF:         bpf(),
		CGroups:     controlGroups(),
		FileSystems: fileSystems(),
		Sockets:     sockets(ctx, cfg),
		Tools:       tools(ctx, cfg),
	}
	f.Store, f.StoreAt = store.Inspect(cfg)
	_, f.LoopControl = os.Stat("/dev/loop-control")
	f.Accelerator = accelerator(ctx, cfg, f)
	if f.Root {
		f.Network = lookAtNetwork(ctx, cfg)
		f.Leftovers = leftover.Find(ctx, cfg)
	}
	return f
}

// accelerator is the verdict. One that is still to be found takes a guest that boots, for which all else must be there.
func accelerator(ctx context.Context, cfg *config.Config, f Facts) Accelerator {
	quiet := slog.New(slog.DiscardHandler)
	l := base.NewLauncher(cfg, guest.Settle(cfg.Timeout), quiet)
	v, err := l.KnownAccelerator()
	if errors.Is(err, accel.ErrUndecided) && f.Root && f.QEMU.Err == nil && f.Guest.Err == nil {
		v, err = l.Accelerator(ctx)
	}
	return Accelerator{Name: string(v.Kind), Reason: v.Reason, Err: err}
}

func host() Host {
	h := Host{Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Virtual: virtual()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	for key, value := range keyValues("/etc/os-release", "=") {
		if key == "PRETTY_NAME" {
			h.OS = strings.Trim(value, `"`)
		}
	}
	_, err := os.Stat("/.dockerenv")
	h.Docker = err == nil
	return h
}

// virtual names what virtualises this host: the firmware's product if it says one, else that the CPU says so.
func virtual() string {
	flags := keyValues("/proc/cpuinfo", ":")["flags"]
	if !slices.Contains(strings.Fields(flags), "hypervisor") {
		return ""
	}
	for _, f := range []string{"/sys/class/dmi/id/product_name", "/sys/hypervisor/type"} {
		if b, err := os.ReadFile(f); err == nil && len(bytes.TrimSpace(b)) > 0 {
			return string(bytes.TrimSpace(b))
		}
	}
	return "unnamed hypervisor"
}

// keyValues reads lines of a key and a value; of equal keys the last one counts.
func keyValues(file, separator string) map[string]string {
	out := make(map[string]string)
	f, err := os.Open(file)
	if err != nil {
		return out
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if key, value, ok := strings.Cut(s.Text(), separator); ok {
			out[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return out
}

func availableMemory() uint64 {
	number, _, _ := strings.Cut(keyValues("/proc/meminfo", ":")["MemAvailable"], " ")
	kib, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}

// look checks an artefact against its digest.
func look(dir, pkg string) Artefact {
	a := Artefact{Dir: dir}
	if _, a.Err = os.Stat(dir); a.Err != nil {
		return a
	}
	m, err := artefact.ReadManifest(dir)
	if err != nil {
		a.Err = err
		return a
	}
	a.Version = m.Packages[pkg]
	if m.Kernel != "" {
		a.Version = fmt.Sprintf("kernel %s, %s %s", m.Kernel, pkg, a.Version)
	}
	a.Err = artefact.Verify(dir)
	return a
}

// tun asks the tun device for its features (TUNGETFEATURES), which takes no privilege and makes nothing.
func tun() error {
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = unix.IoctlGetInt(int(f.Fd()), unix.TUNGETFEATURES)
	return err
}

func isFS(path string, magic int64) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && int64(st.Type) == magic
}

func controlGroups() CGroups {
	var c CGroups
	switch cgroups.Mode() {
	case cgroups.Unified:
		c.Mode = "v2"
		b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
		c.Err = err
		c.Controllers = strings.Fields(string(b))
		return c
	case cgroups.Legacy:
		c.Mode = "v1"
	case cgroups.Hybrid:
		c.Mode = "v1 and v2"
	default:
		c.Err = errors.New("nothing is mounted at /sys/fs/cgroup")
		return c
	}
	entries, err := os.ReadDir("/sys/fs/cgroup")
	c.Err = err
	for _, e := range entries {
		// A co-mounted hierarchy has a directory of that name and a link per controller: cpu,cpuacct.
		if dir := filepath.Join("/sys/fs/cgroup", e.Name()); isFS(dir, unix.CGROUP_SUPER_MAGIC) && !strings.Contains(e.Name(), ",") {
			c.Controllers = append(c.Controllers, e.Name())
		}
	}
	return c
}

func fileSystems() []string {
	var out []string
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 {
			out = append(out, f[len(f)-1])
		}
	}
	return out
}

func sockets(ctx context.Context, cfg *config.Config) Sockets {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(askTimeout))
	defer cancel()
	s := Sockets{Address: cfg.Containerd.Address}
	s.Up, s.Err = stack.Running(cfg)
	if s.Up != 0 {
		s.Report, s.Err = health.Query(ctx, cfg.ControlSocket())
	} else {
		s.Foreign = stack.Foreign(ctx, cfg)
	}
	if s.Address != "" {
		s.Containerd, s.ContainerdErr = stack.Version(ctx, cfg)
	}
	return s
}

func tools(ctx context.Context, cfg *config.Config) []Tool {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(askTimeout))
	defer cancel()
	ours := "`make build` makes it; bin_dir is " + cfg.BinDir
	private := cfg.Containerd.Address == ""
	list := []Tool{
		{Name: "containerd-shim-cube-v2", Path: cfg.Bin("containerd-shim-cube-v2"), Required: true, Remedy: ours},
		{Name: "cube-jail", Path: cfg.Bin("cube-jail"), Required: true, Remedy: ours},
		{Name: "cube-share", Path: cfg.Bin("cube-share"), Required: true, Remedy: ours},
		{Name: "containerd", Path: cfg.Bin("containerd"), Required: private, Remedy: "`make setup` builds it; bin_dir is " + cfg.BinDir},
		{Name: "ctr", Path: cfg.Bin("ctr"), Remedy: "`make setup` builds it; only people need it"},
		{Name: "runc", Path: cfg.Bin("runc"), Remedy: "`make setup` builds it; only containers beside the machines need it"},
		{Name: "mkfs.ext4", Path: "mkfs.ext4", Required: true, Remedy: "apt-get install e2fsprogs"},
		{Name: "mkfs.xfs", Path: "mkfs.xfs", Remedy: "apt-get install xfsprogs"},
	}
	for i := range list {
		list[i].look(ctx)
	}
	return list
}

// look finds the program and asks it for its version.
func (t *Tool) look(ctx context.Context) {
	path, err := exec.LookPath(t.Path)
	if err != nil {
		t.Err = err
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			t.Err = fmt.Errorf("%s isn't there", t.Path)
		}
		return
	}
	t.Path = path
	flag := map[string]string{"mkfs.ext4": "-V", "mkfs.xfs": "-V", "containerd-shim-cube-v2": "-v"}[t.Name]
	switch {
	case t.Name == "cube-jail" || t.Name == "cube-share":
		return // they talk to the shim only
	case flag == "":
		flag = "--version"
	}
	out, err := exec.CommandContext(ctx, path, flag).CombinedOutput() // mke2fs writes it to stderr
	if err != nil {
		t.Err = fmt.Errorf("%s %s: %w", path, flag, err)
		return
	}
	if t.Name != "containerd-shim-cube-v2" { // it tells the version of the library that it is built with
		t.Version = versionIn(string(out))
	}
}

// versionIn is the first word of a program's version output that looks like a version.
func versionIn(out string) string {
	for _, w := range strings.Fields(out) {
		w = strings.Trim(strings.TrimPrefix(w, "v"), ",:;()")
		if len(w) > 0 && w[0] >= '0' && w[0] <= '9' && strings.Contains(w, ".") {
			return w
		}
	}
	return "version unknown"
}
