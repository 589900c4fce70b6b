package qemu

import (
	"fmt"
	"os"
	"strconv"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
)

const (
	// Binary is QEMU's path in its artefact directory, which is the root of the jail.
	Binary = "/usr/bin/qemu-system-x86_64"
	// AgentPort is the name by which the guest finds the agent's channel.
	AgentPort = "cube.agent"
	// ModulesSerial is the disk with the guest's kernel modules, which every machine has.
	ModulesSerial = "modules"
	// BoardVersion changes whenever what a saved state is made of does: machine type, devices, their order, CPU model.
	BoardVersion = 5

	// firmware is qboot: SeaBIOS, the default, has ACPI tables and the rings of disks at the end of the memory, where this
	// board's QEMU puts the initramfs. What that destroys depends on the sizes of both: guests of 2 GiB didn't boot.
	firmware = "qboot.rom"

	scsiBus = "scsi0.0"
	// maxLUN leaves plenty for one container per disk and stays below where virtio-scsi changes its addressing (256).
	maxLUN = 250
	// LUNs: the two disks on the command line, then those plugged in.
	modulesLUN = 0
	rootLUN    = 1
	firstLUN   = 2
	// Descriptor sets, likewise.
	modulesFDSet = 1
	rootFDSet    = 2
	firstFDSet   = 10
)

// CPUModel is what the guest's CPU is: all that the accelerator offers.
func CPUModel(a accel.Kind) string {
	if a == accel.KVM {
		return "host"
	}
	return "max"
}

// Boot is a guest to be started from its kernel. The files are opened for reading.
type Boot struct {
	Kernel, Initrd *os.File
	// TSCKHz is the rate of the host's time stamp counter, which an emulated guest can't find out on a loaded host.
	TSCKHz int
}

// params is the kernel's command line.
func (b *Boot) params(a accel.Kind) []string {
	p := []string{
		"console=ttyS0",
		"quiet",
		// A panic, or a reboot, resets the board at once; -no-reboot makes an end of that.
		"panic=-1", "reboot=t",
	}
	if a == accel.TCG {
		p = append(p,
			"tsc_early_khz="+strconv.Itoa(b.TSCKHz),
			// On a loaded host the kernel would come to distrust it during the boot, and every machine restored from that
			// would count jiffies instead, of which it misses some.
			"tsc=reliable",
			// Against speculation that an emulated CPU doesn't do; they would only cost.
			"mitigations=off",
		)
	}
	return p
}

// fds are the descriptors that the parts of the machine have in the jail.
type fds struct {
	qmp, agent, console, memory, modules, tap int
	kernel, initrd, state, root               int // 0: absent
	plugged                                   []int
}

// layout is the one machine that there is. Whatever changes here needs a new BoardVersion.
func layout(s *Spec, f fds) *Config {
	c := &Config{
		Path: Binary,
		Name: s.ID,
		Board: Board{Type: "microvm", Firmware: firmware, Options: []string{
			"suppress-vmdesc=on",  // the state goes to an equal QEMU only
			"dump-guest-core=off", // no guest memory in a core file
			"mem-merge=off",       // no page sharing between guests that one could measure
		}},
		Accel:  Accel{Name: string(s.Accel)},
		CPU:    CPUModel(s.Accel),
		VCPUs:  s.Shape.VCPUs,
		Memory: Memory{MiB: s.Shape.MemoryMiB, Path: procFD(f.memory), Share: s.Share},
		Devices: []Device{
			SocketChardev{ID: "qmp", FD: f.qmp},
			Monitor{Chardev: "qmp"},
			SocketChardev{ID: "console", FD: f.console},
			Serial{Chardev: "console"},
			VirtioSerial{ID: "serial0", MaxPorts: 2},
			SocketChardev{ID: "agent", FD: f.agent},
			SerialPort{ID: "agentport", Chardev: "agent", Bus: "serial0.0", Number: 1, Name: AgentPort},
			SCSIController{ID: "scsi0"},
			Disk{Serial: ModulesSerial, FDSet: modulesFDSet, FD: f.modules, Bus: scsiBus, LUN: modulesLUN, ReadOnly: true},
		},
		Incoming: f.state,
	}
	if !s.NoRoot {
		c.Devices = append(c.Devices, rootDisk(f.root))
	}
	c.Devices = append(c.Devices, Tap{ID: "nic0", FD: f.tap, MAC: vmm.MAC})
	for i, p := range s.Plugged {
		d := p.disk(i)
		d.FD = f.plugged[i]
		c.Devices = append(c.Devices, d)
	}
	if s.Accel == accel.TCG {
		// MiB of translated code: with 8 a guest thrashes, the default of a quarter of the memory is never used.
		c.Accel.Options = []string{"tb-size=" + strconv.Itoa(tcgCacheMiB)}
	}
	if s.Boot != nil {
		c.Kernel = &Kernel{Path: procFD(f.kernel), Initrd: procFD(f.initrd), Params: s.Boot.params(s.Accel)}
	}
	return c
}

// rootDisk is the machine's first disk. One without an image stands in for any: the guest only learns the size of a disk
// when it finds it, which takes it long, so a guest is saved with a disk as large as can be and restored with the image.
func rootDisk(fd int) Disk {
	d := Disk{Serial: vmm.RootSerial, Bus: scsiBus, LUN: rootLUN}
	if fd == 0 {
		d.Placeholder = vmm.RootBytes
	} else {
		d.FD, d.FDSet = fd, rootFDSet
	}
	return d
}

// procFD is a path for what QEMU opens by name.
func procFD(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }
