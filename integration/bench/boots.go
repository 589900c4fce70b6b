package main

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/base"
)

// bootShape is what boots measures: none that the stack has a base snapshot of.
var bootShape = vmm.Shape{VCPUs: 1, MemoryMiB: 512}

// boots measures cold boots of the guest's kernel: what the first machine of a shape takes, and the base snapshot that it
// leaves.
func (b *bench) boots() error {
	m, err := artefact.ReadManifest(filepath.Clean(b.Config.GuestDir()))
	if err != nil {
		return err
	}
	ctx := context.Background()
	n := max(1, b.n/4)
	var answers, made sample
	var memory, whole []int64
	for range n {
		settle := guest.Settle(b.Config.Timeout)
		l := base.NewLauncher(b.Config, func(ctx context.Context, agent net.Conn) error {
			began := time.Now() // with QEMU's own start, which is a hundredth of it
			err := settle(ctx, agent)
			answers = append(answers, time.Since(began))
			return err
		}, slog.New(slog.DiscardHandler))
		began := time.Now()
		w, err := l.Warm(ctx, bootShape)
		if err != nil {
			return err
		}
		made = append(made, time.Since(began))
		if err := w.Release(); err != nil {
			return err
		}
		mem, all, err := b.dropBase(ctx)
		if err != nil {
			return err
		}
		memory, whole = append(memory, mem), append(whole, all)
	}
	fmt.Printf("\n### Cold boot of kernel %s with %s, saved as a base snapshot; n = %d\n\n"+
		"| | p50 |\n| --- | --- |\n| until the agent answers and is at rest | %.1f s |\n| until the snapshot is complete, synced and in memory | %.1f s |\n"+
		"| memory image, allocated | %.0f MiB |\n| the whole snapshot on disk | %.0f MiB |\n",
		m.Kernel, bootShape, n, answers.quantile(0.5).Seconds(), made.quantile(0.5).Seconds(), mib(quantile(memory, 0.5)), mib(quantile(whole, 0.5)))
	return nil
}

// dropBase removes the base snapshot of bootShape and says what it has taken.
func (b *bench) dropBase(ctx context.Context) (memory, whole int64, err error) {
	kept, err := base.Kept(b.Config)
	if err != nil {
		return 0, 0, err
	}
	for _, k := range kept {
		if k.Shape != bootShape {
			continue
		}
		if memory, err = allocated(filepath.Join(k.Dir, "memory")); err != nil {
			return 0, 0, err
		}
		if whole, err = allocated(k.Dir); err != nil {
			return 0, 0, err
		}
		gone, err := k.Remove(ctx, b.Config)
		if err == nil && !gone {
			err = fmt.Errorf("the base snapshot of %s is in use", bootShape)
		}
		return memory, whole, err
	}
	return 0, 0, fmt.Errorf("there is no base snapshot of %s", bootShape)
}

// allocated is how many bytes of the disk a file has, or all in a directory.
func allocated(path string) (n int64, err error) {
	err = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Sys().(*syscall.Stat_t).Blocks * 512 // st_blocks (stat(3type))
		}
		return err
	})
	return n, err
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }
