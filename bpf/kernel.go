package bpf

import (
	"errors"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/containerd/errdefs"
)

// Where the kernel shows its types, and what it keeps from root: Documentation/bpf/btf.rst, kernel_lockdown(7).
const (
	kernelTypes    = "/sys/kernel/btf/vmlinux"
	kernelLockdown = "/sys/kernel/security/lockdown"
)

// Unfit is a kernel that can't run the datapath. It is errdefs.ErrNotImplemented.
type Unfit struct {
	Lacks  string
	Remedy string // what to do about it
}

func (u *Unfit) Error() string { return u.Lacks + ": " + u.Remedy }

// Unwrap implements errors.Is.
func (u *Unfit) Unwrap() error { return errdefs.ErrNotImplemented }

// CheckKernel says what the datapath takes beyond programs as such and the kernel hasn't: the programs read its memory, for
// what they aren't told of a packet. nil: nothing, or it can't be asked, as by others than root.
func CheckKernel() *Unfit {
	var types error
	if _, err := os.Stat(kernelTypes); err != nil {
		_, types = btf.LoadKernelSpec() // they may be in a file
	}
	read := features.HaveProgramHelper(ebpf.SchedCLS, asm.FnProbeReadKernel)
	lockdown, _ := os.ReadFile(kernelLockdown) // many kernels have none
	return unfit(types, read, string(lockdown))
}

// unfit judges by errors that are ErrNotSupported, and by the modes of the lockdown, of which one is in brackets.
func unfit(types, read error, lockdown string) *Unfit {
	switch {
	case errors.Is(types, ebpf.ErrNotSupported):
		return &Unfit{"the kernel doesn't show its types (BTF) in " + kernelTypes, "use one with CONFIG_DEBUG_INFO_BTF, as distributions' are"}
	case !errors.Is(read, ebpf.ErrNotSupported):
		return nil
	case strings.Contains(lockdown, "[confidentiality]"):
		return &Unfit{"the kernel is locked down for confidentiality, and lets no program read its memory (bpf_probe_read_kernel)", "boot with lockdown=integrity, or without"}
	}
	return &Unfit{"the kernel lets no program read its memory (bpf_probe_read_kernel)", "use one with CONFIG_BPF_EVENTS of version 6.1 or later"}
}
