package base

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Artefact is QEMU or a guest image that is kept.
type Artefact struct {
	artefact.Kept
	Kind string // "qemu" or "guest"
	cfg  *config.Config
}

// Unneeded lists the artefacts that aren't current, and that neither a machine nor a snapshot needs, this stack's or another's
// with the same artefacts, least recently used first. Snapshots of this stack that are doomed don't count. It is
// errdefs.ErrFailedPrecondition when it can't be known what a snapshot needs.
func Unneeded(cfg *config.Config, doomed func(id string) bool) ([]Artefact, error) {
	needed, err := needs(cfg, doomed)
	if err != nil {
		return nil, err
	}
	var all []Artefact
	for _, parent := range []string{filepath.Dir(cfg.QEMUDir()), filepath.Dir(cfg.GuestDir())} {
		kept, err := artefact.List(parent)
		if err != nil {
			return nil, err
		}
		for _, k := range kept {
			if !k.Current && !needed[filepath.Join(filepath.Base(parent), k.Digest)] && !k.InUse() {
				all = append(all, Artefact{Kept: k, Kind: filepath.Base(parent), cfg: cfg})
			}
		}
	}
	return all, nil
}

// Remove removes it, unless somebody needs it by now. It tells whether it is gone.
func (a Artefact) Remove(ctx context.Context) (gone bool, err error) {
	return a.Kept.Remove(ctx, func() (bool, error) {
		needed, err := needs(a.cfg, func(string) bool { return false })
		return needed[filepath.Join(a.Kind, a.Digest)], err
	})
}

// removeArtefacts removes what nobody needs until it is enough.
func removeArtefacts(ctx context.Context, cfg *config.Config, log *slog.Logger, enough func() bool) {
	all, err := Unneeded(cfg, func(string) bool { return false })
	for _, a := range all {
		if err != nil || enough() {
			break
		}
		log.Info("removing an artefact that nobody needs, because the store is full", "dir", a.Dir, "last use", a.Used)
		_, err = a.Remove(ctx)
	}
	if err != nil {
		log.Warn("remove artefacts that nobody needs", "error", err)
	}
}

// needs are all artefacts that snapshots need, like "qemu/<digest>". A machine that runs keeps its own in another way, and one that
// is saved runs until its snapshot is there.
func needs(cfg *config.Config, doomed func(id string) bool) (map[string]bool, error) {
	needed := map[string]bool{}
	stacks, err := artefact.Stacks(cfg.Artefacts)
	if err != nil {
		return nil, err
	}
	for _, dir := range append(stacks, cfg.StateDir) {
		stack := *cfg
		stack.StateDir = dir
		if err := mounted(&stack); err != nil {
			return nil, err
		}
		all, err := snapshot.New(&stack, slog.New(slog.DiscardHandler)).List()
		if err != nil {
			return nil, err
		}
		for _, s := range all {
			switch {
			case dir == cfg.StateDir && doomed(s.ID):
			case s.Damage != "":
				return nil, unknown("snapshot %s in %s can't be read: %s; delete it", s.ID, stack.SnapshotDir(), s.Damage)
			default:
				needed[filepath.Join("qemu", s.Platform.QEMU)], needed[filepath.Join("guest", s.Platform.Guest)] = true, true
			}
		}
	}
	return needed, nil
}

// mounted returns an error if the stack's snapshots are in an image that isn't mounted.
func mounted(stack *config.Config) error {
	if _, err := os.Stat(stack.StoreImage()); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	if _, err := os.Stat(stack.StoreDir()); err != nil || sameFS(stack.StateDir, stack.StoreDir()) {
		return unknown("the store in %s isn't mounted; start its stack", stack.StateDir)
	}
	return nil
}

func unknown(format string, args ...any) error {
	return errdefs.ErrFailedPrecondition.WithMessage("old artefacts stay, since it can't be known what needs them: " + fmt.Sprintf(format, args...))
}

// sameFS tells whether both are on one file system. What isn't there is on none.
func sameFS(a, b string) bool {
	var x, y unix.Stat_t
	return unix.Stat(a, &x) == nil && unix.Stat(b, &y) == nil && x.Dev == y.Dev
}
