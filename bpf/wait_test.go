package bpf

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// TestWaitPrograms: a program that runs when the wait begins has ended when it ends.
func TestWaitPrograms(t *testing.T) {
	capable(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(err)
	defer m.Close()
	again, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(err)
	defer again.Close()
	// It says how far it is, and takes as long as the kernel lets it: it begins again until that is too often.
	const begun, ended = 1, 2
	say := func(what int32) asm.Instructions {
		return asm.Instructions{asm.Mov.Imm(asm.R1, what), asm.StoreMem(asm.R7, 0, asm.R1, asm.DWord)}
	}
	ins := asm.Instructions{asm.Mov.Reg(asm.R8, asm.R1), asm.LoadMapValue(asm.R7, m.FD(), 0)}
	ins = append(ins, say(begun)...)
	ins = append(ins,
		asm.Mov.Imm(asm.R6, 50_000), asm.FnKtimeGetNs.Call().WithSymbol("more"), asm.Sub.Imm(asm.R6, 1), asm.JNE.Imm(asm.R6, 0, "more"),
		asm.Mov.Reg(asm.R1, asm.R8), asm.LoadMapPtr(asm.R2, again.FD()), asm.Mov.Imm(asm.R3, 0), asm.FnTailCall.Call(),
	)
	ins = append(append(ins, say(ended)...), noop()...)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: ins})
	must(err)
	defer p.Close()
	must(again.Put(uint32(0), p))
	said := func() (at uint64) {
		must(m.Lookup(uint32(0), &at))
		return at
	}

	const rounds = 5
	running, waited := 0, time.Duration(0)
	for range rounds {
		must(m.Put(uint32(0), uint64(0)))
		done := make(chan error, 1)
		go func() {
			_, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
			done <- err
		}()
		at := said()
		for end := time.Now().Add(wait); at == 0 && time.Now().Before(end); {
			at = said()
		}
		if at == begun {
			running++
		}
		began := time.Now()
		must(waitPrograms())
		waited += time.Since(began)
		if at := said(); at != ended {
			t.Errorf("the program is at %d of %d", at, ended)
		}
		must(<-done)
	}
	t.Logf("%d of %d programs ran when the wait began, which took %v each", running, rounds, (waited / rounds).Round(time.Microsecond))
}
