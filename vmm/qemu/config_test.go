package qemu

import (
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
)

var update = flag.Bool("update", false, "write the golden files")

// TestLayout pins the command lines. A difference is a different machine: BoardVersion must change with it.
func TestLayout(t *testing.T) {
	f := fds{qmp: 3, agent: 4, console: 5, memory: 6, modules: 7}
	boot, restore := f, f
	boot.kernel, boot.initrd, boot.tap = 8, 9, 10
	restore.state, restore.root, restore.tap = 8, 9, 10
	resume := f
	resume.state, resume.plugged, resume.tap = 8, []int{9, 10}, 11
	plugged := []Plugged{
		{Disk: vmm.Disk{Serial: "data"}, LUN: 4},
		{Disk: vmm.Disk{Serial: "layer", ReadOnly: true}, LUN: 2},
	}
	for name, tc := range map[string]struct {
		spec Spec
		fds  fds
	}{
		"boot-tcg":    {Spec{ID: "t1", Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Accel: accel.TCG, Share: true, Boot: &Boot{TSCKHz: 2400000}}, boot},
		"boot-kvm":    {Spec{ID: "t1", Shape: vmm.Shape{VCPUs: 4, MemoryMiB: 2048}, Accel: accel.KVM, Share: true, Boot: &Boot{}}, boot},
		"restore-tcg": {Spec{ID: "a,b", Shape: vmm.Shape{VCPUs: 2, MemoryMiB: 512}, Accel: accel.TCG}, restore},
		"resume-tcg":  {Spec{ID: "t1", Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Accel: accel.TCG, NoRoot: true, Plugged: plugged}, resume},
		"restore-kvm": {Spec{ID: "t1", Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Accel: accel.KVM}, restore},
	} {
		t.Run(name, func(t *testing.T) {
			argv, err := layout(&tc.spec, tc.fds).Argv()
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(argv, "\n") + "\n"
			path := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("the command line has changed (-update writes it, and BoardVersion must change):\n%s", got)
			}
		})
	}
}

func TestConfigValid(t *testing.T) {
	good := func() *Config {
		return &Config{
			Path: "/usr/bin/qemu", Name: "n", Board: Board{Type: "microvm", Firmware: "f"}, Accel: Accel{Name: "tcg"}, CPU: "max", VCPUs: 1,
			Memory: Memory{MiB: 1, Path: "/proc/self/fd/3"}, Kernel: &Kernel{Path: "k", Initrd: "i"},
		}
	}
	if err := good().Valid(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Config){
		"relative path":       func(c *Config) { c.Path = "qemu" },
		"no name":             func(c *Config) { c.Name = "" },
		"no board":            func(c *Config) { c.Board.Type = "" },
		"no firmware":         func(c *Config) { c.Board.Firmware = "" },
		"no accelerator":      func(c *Config) { c.Accel.Name = "" },
		"no CPU":              func(c *Config) { c.CPU = "" },
		"no vCPUs":            func(c *Config) { c.VCPUs = 0 },
		"no memory":           func(c *Config) { c.Memory.MiB = 0 },
		"memory of two files": func(c *Config) { c.Memory.Path = "a,b" },
		"nothing to run":      func(c *Config) { c.Kernel = nil },
		"two things to run":   func(c *Config) { c.Incoming = 5 },
		"no initrd":           func(c *Config) { c.Kernel.Initrd = "" },
		"a bad device":        func(c *Config) { c.Devices = []Device{SCSIController{ID: "9"}} },
	} {
		c := good()
		spoil(c)
		if c.Valid() == nil {
			t.Errorf("%s is valid", name)
		}
		if _, err := c.Argv(); err == nil {
			t.Errorf("%s has a command line", name)
		}
	}
}

func TestDeviceValid(t *testing.T) {
	for name, d := range map[string]Device{
		"chardev id":      SocketChardev{ID: "a,b", FD: 3},
		"chardev fd":      SocketChardev{ID: "a", FD: 2},
		"monitor":         Monitor{},
		"serial":          Serial{},
		"ports":           VirtioSerial{ID: "a", MaxPorts: 1},
		"port zero":       SerialPort{ID: "a", Chardev: "b", Bus: "c", Name: "d"},
		"port name":       SerialPort{ID: "a", Chardev: "b", Bus: "c", Number: 1},
		"scsi":            SCSIController{},
		"disk serial":     Disk{Serial: "A", FDSet: 1, Bus: "b"},
		"disk set":        Disk{Serial: "a", Bus: "b"},
		"disk or not":     Disk{Serial: "a", Bus: "b", FDSet: 1, Placeholder: 1},
		"disk lun":        Disk{Serial: "a", FDSet: 1, Bus: "b", LUN: maxLUN + 1},
		"nic address":     Tap{ID: "a", FD: 3},
		"nic descriptor":  Tap{ID: "a", FD: 0, MAC: vmm.MAC},
		"nic id":          Tap{ID: "-", FD: 3, MAC: vmm.MAC},
		"nic eui64":       Tap{ID: "a", FD: 3, MAC: make(net.HardwareAddr, 8)},
		"id that is long": SCSIController{ID: strings.Repeat("a", 40)},
	} {
		if d.Valid() == nil {
			t.Errorf("%s: %+v is valid", name, d)
		}
	}
	if _, err := (Disk{Serial: "a", FDSet: 1, Bus: "b"}).Params(); err == nil {
		t.Error("a disk without a descriptor can't be on the command line")
	}
}
