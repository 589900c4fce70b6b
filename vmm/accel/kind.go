package accel

// Kind is what executes the guest's code.
type Kind string

// The accelerators, by QEMU's names.
const (
	KVM Kind = "kvm" // the processor
	TCG Kind = "tcg" // emulation
)
