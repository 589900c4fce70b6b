package qemu

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// Config is a QEMU command line: what is not a device. Zero values of optional fields leave the option out.
type Config struct {
	Path   string // the binary
	Name   string // shows in ps
	Board  Board
	Accel  Accel
	CPU    string // CPU model
	VCPUs  int
	Memory Memory
	Kernel *Kernel // boot this; exclusive with Incoming
	// Incoming is the descriptor that the state to restore is read from.
	Incoming int
	// Devices, in the order in which a saved state expects them.
	Devices []Device
}

// Device is anything that adds options of its own.
type Device interface {
	// Valid says what is wrong with the device.
	Valid() error
	// Params are the device's options. Only for a valid one.
	Params() ([]string, error)
}

// Board is what QEMU calls a machine.
type Board struct {
	Type     string   // "microvm"
	Options  []string // key=value
	Firmware string   // a file of QEMU's own
}

// Accel is what executes the guest's code.
type Accel struct {
	Name    string   // "kvm" or "tcg"
	Options []string // key=value
}

// Memory is the guest's, all of it one file.
type Memory struct {
	MiB   int
	Path  string
	Share bool // the file is the memory; otherwise a private copy of it
	// Reserve has the kernel promise all of a private copy beforehand, which it refuses beyond what the host has.
	Reserve bool
}

// Kernel is what is booted.
type Kernel struct {
	Path, Initrd string
	Params       []string
}

// memoryID ties the machine to its memory object.
const memoryID = "mem"

// Valid says what is wrong with the configuration, devices included.
func (c *Config) Valid() error {
	switch {
	case !filepath.IsAbs(c.Path):
		return fmt.Errorf("path of QEMU %q", c.Path)
	case c.Name == "":
		return errors.New("no name")
	case c.Board.Type == "" || c.Board.Firmware == "" || c.Accel.Name == "" || c.CPU == "":
		return errors.New("machine type, firmware, accelerator and CPU model must be given")
	case c.VCPUs < 1:
		return fmt.Errorf("%d vCPUs", c.VCPUs)
	case c.Memory.MiB < 1 || c.Memory.Path == "" || strings.ContainsAny(c.Memory.Path, ",\n"):
		return fmt.Errorf("memory %+v", c.Memory)
	case (c.Kernel == nil) == (c.Incoming == 0):
		return errors.New("either a kernel to boot or a state to restore must be given")
	case c.Kernel != nil && (c.Kernel.Path == "" || c.Kernel.Initrd == ""):
		return fmt.Errorf("kernel %+v", *c.Kernel)
	}
	for _, d := range c.Devices {
		if err := d.Valid(); err != nil {
			return err
		}
	}
	return nil
}

// Argv is the whole command line.
func (c *Config) Argv() ([]string, error) {
	if err := c.Valid(); err != nil {
		return nil, fmt.Errorf("qemu command line: %w", err)
	}
	size := strconv.Itoa(c.Memory.MiB)
	memory, err := object("memory-backend-file", memoryID, map[string]any{
		"size":     int64(c.Memory.MiB) << 20,
		"mem-path": c.Memory.Path,
		"share":    c.Memory.Share,
		"reserve":  c.Memory.Reserve,
	})
	if err != nil {
		return nil, err
	}
	argv := []string{
		c.Path,
		"-name", escape(c.Name),
		"-M", options(c.Board.Type, append([]string{"memory-backend=" + memoryID}, c.Board.Options...)),
		"-bios", c.Board.Firmware,
		"-accel", options(c.Accel.Name, c.Accel.Options),
		"-cpu", c.CPU,
		"-smp", fmt.Sprintf("cpus=%d,sockets=1,cores=%d,threads=1", c.VCPUs, c.VCPUs),
		"-m", size,
		"-object", memory,
		// Nothing that isn't asked for here.
		"-nodefaults", "-no-user-config", "-display", "none",
		// A guest that resets (as after a panic) ends the machine: a restart in place would hide it.
		"-no-reboot",
		// All system calls that QEMU doesn't need, and any new process or privilege.
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
	}
	if c.Kernel != nil {
		argv = append(argv, "-kernel", c.Kernel.Path, "-initrd", c.Kernel.Initrd, "-append", strings.Join(c.Kernel.Params, " "))
	}
	for _, d := range c.Devices {
		params, err := d.Params()
		if err != nil {
			return nil, err
		}
		argv = append(argv, params...)
	}
	if c.Incoming != 0 {
		// The state is of devices only, without the section that describes the configuration.
		argv = append(argv, "-global", "migration.send-configuration=off",
			// No frames by which a network would learn that the machine has moved: it hasn't. See also Tap.
			"-global", "migration.announce-rounds=0",
			"-incoming", fmt.Sprintf("fd:%d", c.Incoming))
	}
	return argv, nil
}

func options(first string, rest []string) string {
	return strings.Join(append([]string{first}, rest...), ",")
}

// escape doubles commas, which would otherwise begin another key=value.
func escape(s string) string { return strings.ReplaceAll(s, ",", ",,") }
