package doctor

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/docker/go-units"

	datapath "github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/leftover"
	"github.com/cubesandbox/cube/snapshotter/store"
)

// good is a host on which all is well.
func good() Facts {
	return Facts{
		Root:        true,
		Host:        Host{Kernel: "6.1.0", Arch: "amd64", OS: "Debian 12", CPUs: 2},
		Memory:      8 * units.GiB,
		QEMU:        Artefact{Dir: "/a/qemu", Version: "7.2"},
		Guest:       Artefact{Dir: "/a/guest", Version: "kernel 6.1"},
		Store:       store.Status{Kind: store.Image, Dir: "/s", Ready: true, Reflink: true, Size: 16 * units.GiB, Free: 10 * units.GiB},
		BPF:         BPF{TCX: true},
		CGroups:     CGroups{Mode: "v2", Controllers: []string{"cpu", "memory", "pids"}},
		FileSystems: []string{"ext4", "xfs"},
		Tools:       []Tool{{Name: "containerd", Path: "/b/containerd", Version: "2.4.2", Required: true}},
		Accelerator: Accelerator{Name: "kvm", Reason: "the guest boots"},
	}
}

// overview is of a network that is up.
func overview(found ...network.Finding) *network.Overview {
	return &network.Overview{
		Device: "cube-gw", Address: netip.MustParseAddr("10.200.255.254"), MTU: 1500, Hook: "tcx", Uplink: []string{"eth0"},
		Open: 2, Closed: 1, Warm: 8, Findings: found,
	}
}

// up is a stack that runs.
func up() Sockets { return Sockets{Up: 7, Report: health.Report{Ready: true}} }

func TestJudge(t *testing.T) {
	no := errors.New("no such device")
	for _, tc := range []struct {
		name    string
		change  func(*config.Config, *Facts)
		level   Level
		finding string
		word    string // in detail or remedy
	}{
		{"arm", func(_ *config.Config, f *Facts) { f.Host.Arch = "arm64" }, Fail, "host", "amd64"},
		{"virtual", func(_ *config.Config, f *Facts) { f.Host.Virtual = "Firecracker" }, OK, "host", "Firecracker"},
		{"not root", func(_ *config.Config, f *Facts) { f.Root = false }, Fail, "user", "sudo"},
		{"no memory", func(_ *config.Config, f *Facts) { f.Memory = 100 * units.MiB }, Fail, "memory", "vm.memory"},
		{"little memory", func(_ *config.Config, f *Facts) { f.Memory = 500 * units.MiB }, Warn, "memory", "few machines"},
		{"kvm", func(*config.Config, *Facts) {}, OK, "accelerator", "the guest boots"},
		{"tcg because kvm fails", func(_ *config.Config, f *Facts) { f.Accelerator = Accelerator{Name: "tcg", Reason: "no answer"} }, Warn, "accelerator", "slower"},
		{"tcg as configured", func(c *config.Config, f *Facts) { c.VM.Accelerator = "tcg"; f.Accelerator.Name = "tcg" }, OK, "accelerator", "as configured"},
		{"no accelerator", func(_ *config.Config, f *Facts) { f.Accelerator.Err = no }, Fail, "accelerator", "tcg"},
		{"no qemu", func(_ *config.Config, f *Facts) { f.QEMU.Err = fs.ErrNotExist }, Fail, "qemu", "make setup"},
		{"no guest", func(_ *config.Config, f *Facts) { f.Guest.Err = fs.ErrNotExist }, Fail, "guest image", "make setup"},
		{"no store", func(_ *config.Config, f *Facts) { f.StoreAt = no }, Fail, "store", "store.size"},
		{"copies", func(_ *config.Config, f *Facts) { f.Store.Reflink = false }, Warn, "reflink", "copy"},
		{"store to come", func(_ *config.Config, f *Facts) { f.Store.Ready = false }, OK, "reflink", "`cube up` makes it"},
		{"full", func(_ *config.Config, f *Facts) { f.Store.Free = units.MiB }, Fail, "disk", "make room"},
		{"nearly full", func(_ *config.Config, f *Facts) { f.Store.Free = units.GiB }, Warn, "disk", "make room"},
		{"no loop", func(_ *config.Config, f *Facts) { f.LoopControl = no }, Fail, "loop devices", "modprobe loop"},
		{"no xfs", func(_ *config.Config, f *Facts) { f.FileSystems = []string{"ext4"} }, Warn, "file systems", "modprobe xfs"},
		{"no xfs needed", func(_ *config.Config, f *Facts) { f.FileSystems = []string{"ext4"}; f.Store.Kind = store.Directory }, OK, "file systems", "ext4"},
		{"no tun", func(_ *config.Config, f *Facts) { f.TUN = no }, Fail, "tun", "modprobe tun"},
		{"no bpf", func(_ *config.Config, f *Facts) { f.BPF.Err = no }, Fail, "bpf", "CONFIG_BPF_SYSCALL"},
		{"unfit for the datapath", func(_ *config.Config, f *Facts) {
			f.BPF.Unfit = &datapath.Unfit{Lacks: "no BTF", Remedy: "another kernel"}
		}, Fail, "bpf", "no BTF another kernel"},
		{"no tcx", func(_ *config.Config, f *Facts) { f.BPF.TCX = false }, OK, "bpf", "filters"},
		{"network to come", func(*config.Config, *Facts) {}, OK, "network", "`cube up` sets it up, with the pool 10.200.0.0/16"},
		{"network", func(_ *config.Config, f *Facts) { f.Network.Overview = overview(); f.Sockets = up() }, OK, "network", "cube-gw at 10.200.255.254 with an MTU of 1500, by eth0, programs by tcx; 2 open, 1 closed, 8 taps ready"},
		{"network unseen", func(_ *config.Config, f *Facts) { f.Network.Err = no }, Warn, "network", "no such"},
		{"network without a daemon", func(_ *config.Config, f *Facts) { f.Network.Overview = overview() }, Warn, "network", "3 sandboxes are in it and no `cube up` runs"},
		{"foreign rules", func(_ *config.Config, f *Facts) {
			f.Network.Findings = []network.Finding{{Level: gateway.Blocked, Detail: "chain FORWARD drops", Remedy: "iptables -I"}}
		}, Fail, "network", "chain FORWARD drops iptables -I"},
		{"no default route", func(_ *config.Config, f *Facts) {
			f.Network.Findings = []network.Finding{{Level: gateway.Hint, Detail: "there is no default route", Remedy: "add one"}}
		}, Warn, "network", "there is no default route"},
		{"broken while it runs", func(_ *config.Config, f *Facts) {
			f.Sockets = up()
			f.Network.Overview = overview(network.Finding{Level: gateway.Broken, Detail: "table cube is missing", Remedy: "cube up"})
		}, Fail, "network", "table cube is missing"},
		{"broken while nothing runs", func(_ *config.Config, f *Facts) {
			f.Network.Overview = overview(network.Finding{Level: gateway.Broken, Detail: "table cube is missing", Remedy: "cube up"})
		}, Warn, "network", "table cube is missing"},
		{"no cgroups", func(_ *config.Config, f *Facts) { f.CGroups.Err = no }, Fail, "cgroups", "mount"},
		{"no memory controller", func(_ *config.Config, f *Facts) { f.CGroups.Controllers = []string{"cpu", "pids"} }, Fail, "cgroups", "without memory"},
		{"no cpu controller", func(_ *config.Config, f *Facts) { f.CGroups.Controllers = []string{"memory", "pids"} }, Warn, "cgroups", "without cpu"},
		{"foreign socket", func(_ *config.Config, f *Facts) { f.Sockets.Foreign = "/run/x.sock" }, Fail, "sockets", "/run/x.sock"},
		{"running", func(_ *config.Config, f *Facts) { f.Sockets = up() }, OK, "stack", "process 7"},
		{"running, not ready", func(_ *config.Config, f *Facts) {
			f.Sockets = Sockets{Up: 7, Report: health.Report{Dependencies: []health.Dependency{{Name: "containerd", State: health.Failed, Reason: "dead"}}}}
		}, Fail, "stack", "containerd: failed (dead)"},
		{"running, hung", func(_ *config.Config, f *Facts) { f.Sockets = Sockets{Up: 7, Err: no} }, Fail, "stack", "cube down"},
		{"existing containerd", func(_ *config.Config, f *Facts) { f.Sockets = Sockets{Address: "/run/c.sock", Containerd: "2.4.2"} }, OK, "containerd", "2.4.2 at /run/c.sock"},
		{"old containerd", func(_ *config.Config, f *Facts) {
			f.Sockets = Sockets{Address: "/run/c.sock", ContainerdErr: errors.New("too old")}
		}, Fail, "containerd", "too old"},
		{"missing tool", func(_ *config.Config, f *Facts) { f.Tools[0].Err = no; f.Tools[0].Remedy = "build it" }, Fail, "containerd", "build it"},
		{"missing tool for people", func(_ *config.Config, f *Facts) { f.Tools[0].Err = no; f.Tools[0].Required = false }, Warn, "containerd", "no such"},
		{"no mkfs.xfs with a store to make", func(_ *config.Config, f *Facts) {
			f.Store.Ready = false
			f.Tools = []Tool{{Name: "mkfs.xfs", Err: no}}
		}, Fail, "mkfs.xfs", "no such"},
		{"leftover", func(_ *config.Config, f *Facts) {
			f.Leftovers.Found = []leftover.Leftover{{Kind: "log", Name: "/l/x.log", Detail: "there is no container x", Size: 2 * units.MiB, Since: time.Unix(1<<30, 0), Remedy: "removes it"}}
		}, Left, "log", "/l/x.log: there is no container x, 2MiB, since " + time.Unix(1<<30, 0).Format(time.DateTime) + " `cube doctor --fix` removes it"},
		{"contradiction", func(_ *config.Config, f *Facts) {
			f.Leftovers.Found = []leftover.Leftover{{Kind: "task", Name: "ns/x", Detail: "a ghost", Remedy: "ctr task rm", Stays: true}}
		}, Left, "task", "ns/x: a ghost ctr task rm"},
		{"leftovers unseen", func(_ *config.Config, f *Facts) { f.Leftovers.Err = no }, Warn, "leftovers", "no such"},
		{"leftovers without containerd", func(_ *config.Config, f *Facts) { f.Leftovers.Blind = no }, OK, "leftovers", "without containerd"},
		{"no leftovers", func(*config.Config, *Facts) {}, OK, "leftovers", "none"},
		{"no mkfs.xfs with a store", func(_ *config.Config, f *Facts) { f.Tools = []Tool{{Name: "mkfs.xfs", Err: no}} }, Warn, "mkfs.xfs", "no such"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, facts := config.Default(), good()
			tc.change(cfg, &facts)
			found := false
			for _, f := range Judge(cfg, facts) {
				if f.Name == tc.finding && f.Level == tc.level && strings.Contains(f.Detail+" "+f.Remedy, tc.word) {
					found = true
				}
				if f.Name != tc.finding && f.Level == Fail {
					t.Errorf("fails for another reason: %+v", f)
				}
				if f.Level != OK && f.Remedy == "" && !strings.Contains(tc.name, "tool") && !strings.Contains(tc.name, "mkfs") {
					t.Errorf("no remedy: %+v", f)
				}
			}
			if !found {
				t.Errorf("no %s of %s with %q in %+v", tc.level, tc.finding, tc.word, Judge(cfg, facts))
			}
		})
	}
}

func TestGoodHostHasNothingToRemedy(t *testing.T) {
	for _, f := range Judge(config.Default(), good()) {
		if f.Level != OK || f.Remedy != "" {
			t.Errorf("%+v", f)
		}
	}
}

func TestCountAndWrite(t *testing.T) {
	findings := []Finding{
		{Level: OK, Name: "host", Detail: "fine"},
		{Level: Warn, Name: "bpf", Detail: "no", Remedy: "mount it"},
		{Level: Fail, Name: "tun", Detail: "none", Remedy: "modprobe tun"},
	}
	if n := Count(findings, Fail); n != 1 {
		t.Errorf("%d failed, want 1", n)
	}
	var b strings.Builder
	if err := Write(&b, findings); err != nil {
		t.Fatal(err)
	}
	want := "ok    host  fine\nwarn  bpf   no — mount it\nfail  tun   none — modprobe tun\n"
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}

// TestGather looks at this host, of which some things are certain.
func TestGather(t *testing.T) {
	cfg := config.Default()
	dir := t.TempDir()
	cfg.StateDir, cfg.RunDir, cfg.BinDir, cfg.Artefacts = dir+"/state", dir+"/run", dir+"/bin", dir+"/artefacts"
	f := Gather(t.Context(), cfg)
	if f.Host.Kernel == "" || f.Host.CPUs < 1 || f.Memory == 0 {
		t.Errorf("host %+v with %d bytes", f.Host, f.Memory)
	}
	if f.Root != (os.Geteuid() == 0) {
		t.Error("root")
	}
	if !errors.Is(f.QEMU.Err, fs.ErrNotExist) || !errors.Is(f.Guest.Err, fs.ErrNotExist) {
		t.Errorf("artefacts that aren't there: %v, %v", f.QEMU.Err, f.Guest.Err)
	}
	if f.Sockets.Up != 0 || f.Sockets.Err != nil || f.Sockets.Foreign != "" {
		t.Errorf("nobody has this run directory: %+v", f.Sockets)
	}
	if f.Root && (f.Network.Err != nil || f.Network.Overview != nil) {
		t.Errorf("a network that isn't up: %+v", f.Network)
	}
	for _, tool := range f.Tools {
		if strings.HasPrefix(tool.Path, cfg.BinDir) && tool.Err == nil {
			t.Errorf("%s can't be in %s", tool.Name, cfg.BinDir)
		}
	}
	if len(f.Leftovers.Found) > 0 || f.Leftovers.Err != nil || f.Root && f.Leftovers.Blind == nil {
		t.Errorf("leftovers of a stack that never was: %+v", f.Leftovers)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("it made something: %v, %v", entries, err)
	}
}

func TestVersionIn(t *testing.T) {
	for out, want := range map[string]string{
		"containerd github.com/containerd/containerd/v2 v2.4.2 abc": "2.4.2",
		"runc version 1.5.2\ncommit: x":                             "1.5.2",
		"mke2fs 1.47.0 (5-Feb-2023)\n\tUsing EXT2FS":                "1.47.0",
		"mkfs.xfs version 6.1.0":                                    "6.1.0",
		"nothing":                                                   "version unknown",
	} {
		if got := versionIn(out); got != want {
			t.Errorf("%q: %q, want %q", out, got, want)
		}
	}
}

// TestBusyNetwork: a network that somebody changes isn't one that is down.
func TestBusyNetwork(t *testing.T) {
	cfg := config.Default()
	cfg.RunDir = t.TempDir()
	if err := os.Mkdir(cfg.NetworkDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	unlock, err := flock.LockDir(t.Context(), cfg.NetworkDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if n := lookAtNetwork(ctx, cfg); n.Err == nil || !strings.Contains(n.Err.Error(), "others who change the network") {
		t.Errorf("it is %+v", n)
	}
}
