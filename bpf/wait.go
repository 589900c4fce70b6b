package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// waitPrograms returns when every program that was running has ended. A change of a map of maps is one that the kernel returns
// from only then, for who takes the inner map that was there before. membarrier(2) waits for the same, but not on kernels
// with nohz_full.
func waitPrograms() (err error) {
	inner := &ebpf.MapSpec{Name: "wait_inner", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "wait", Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner,
	})
	if err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	defer func() { err = errors.Join(err, outer.Close()) }()
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := outer.Put(uint32(0), m); err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}
